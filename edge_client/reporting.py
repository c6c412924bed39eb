"""A device's results on disk: its figures, and the model of its own cluster, both saved periodically."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from crypto.seal.identity import open_document
from edge_client.learning.reading import NONE_LEFT_OUT, LeftOut
from edge_client.storage.finished_models import FinishedModel, FinishedModels
from edge_client.storage.state import DeviceState, OwnModel
from shoal.errors import ConfigError, IntegrityError, ShoalError, UntrustedError, reason_of
from shoal.limits import CLOCK_OFF_S
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import ModelChoice, RunPackage, RunPlan
from shoal.protocol.messages import Announcement, Assignment, Phase
from shoal.util.console import second, span

if TYPE_CHECKING:
    from crypto.seal.replay import ReplayWatermark
    from edge_client.learning.update import Finished
    from edge_client.membership import DeviceMembership
    from edge_client.models.round_context import Run
    from edge_client.protocol.session import DeviceSession
    from shoal.transport.base import Transport
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")
STATUS_EVERY_S: Final = 1.0
SAVE_MODEL_EVERY_S: Final = 30.0
ALIVE_EVERY_S: Final = 60.0
"""Interval at which the time of the status file is set: seldom, because devices store it on flash memory."""
SILENT_S: Final = 3 * ALIVE_EVERY_S
"""A device whose program runs, and whose status file is older, hangs, is suspended or can't write to its disk."""
RUNS_REMEMBERED: Final = 16
CLOCK_HINT: Final = "set this machine's clock, or the aggregator's if that is wrong (timedatectl set-ntp true)"


class Results:
    """The results of the current run, and the figures of earlier ones."""

    def __init__(
        self,
        membership: DeviceMembership,
        files: DeviceState,
        transport: Transport,
        clock_s: Callable[[], float],
        *,
        executor: str = "",
    ) -> None:
        """Load the figures of an earlier process.

        Args:
            membership: the device's.
            files: its directory.
            transport: counts the bytes of a run.
            clock_s: returns unix seconds.
            executor: name of the executor, which the status file shows; empty to leave it out.
        """
        self._executor = {"executor": executor} if executor else {}
        self._clock_s = clock_s
        self._finished = FinishedModels(membership.directory)
        self._finished.tidy()
        self._run: Run | None = None
        self._membership = membership
        self._files = files
        self._transport = transport
        self._own: OwnModel | None = None
        self._saved_model_s = self._saved_status_s = -math.inf
        self._connection: dict[str, Any] = {}
        self._clock: dict[str, str] = {}
        self._written_connection: dict[str, Any] = {}
        self._figures: dict[str, Any] = {}
        self._refused: dict[str, Any] = {}
        self._left_out = NONE_LEFT_OUT
        self._summary: dict[str, Any] = {}
        ended = (files.load_status() or {}).get("ended")
        before = ended.items() if isinstance(ended, dict) else ()
        self._ended: dict[str, dict[str, Any]] = {run: told for run, told in before if isinstance(told, dict)}
        self._base = (0, 0)
        self._untold = b""

    def begin(self, run: Run) -> None:
        """Start the figures of a run."""
        plan = run.plan
        self._run, self._refused = run, {}
        self._base = (self._transport.bytes_sent, self._transport.bytes_received)
        ended = self._ended.get(str(plan.run), {})
        self._figures = {
            "run": plan.run,
            "algorithm": plan.recipe.algorithm,
            "mode": plan.recipe.mode,
            "rounds": 0,
            **ended,
        }
        self._figures.pop("warnings", None)  # those of the samples as they are now follow

    def leave_out(self, left_out: LeftOut) -> bool:
        """Log and show the damaged samples that are left out of the data; return whether that has changed."""
        changed = left_out != self._left_out
        self._left_out = left_out
        if changed and left_out.count:
            LOG.warning("damaged samples are left out", extra={"kv": dataclasses.asdict(left_out)})
        return changed

    def refuse(self, run: int, error: ShoalError, session: DeviceSession, now_s: float) -> bool:
        """Show in the status file why this device can't do a run, until it follows one; return whether that is new."""
        before, told = self._refused, {"run": run, "reason": reason_of(error), "hint": error.hint}
        self._refused = {"refused": told}
        self.publish(session, now_s, force=True)
        return self._refused != before

    @property
    def answers(self) -> FinishedModel | None:
        """The finished model that answers; None without one, or if the list of models is damaged."""
        try:
            return self._finished.standing().answers
        except (ConfigError, IntegrityError):
            return None  # `predict` and `shoal-edge models` report the damage

    def compare_clock(self, sent_at_s: int) -> None:
        """Note for log and status file if the device's clock is behind a time that is over by the aggregator's clock."""
        behind_s = sent_at_s - int(self._clock_s())
        before, self._clock = self._clock, {}
        if behind_s > CLOCK_OFF_S:
            said = f"at least {span(behind_s)} behind the aggregator's; {CLOCK_HINT}"
            self._clock = {"clock": said}
            if not before:
                LOG.warning("this machine's clock is %s", said)

    def choose(self, signed: bytes) -> bool:
        """Let the model answer that the owner has chosen; return whether that changed anything.

        Raises:
            UntrustedError, WireError: the owner has not signed the choice, or it is of another fleet.
            ConfigError: it can't be stored.
            IntegrityError: the list of models is damaged.
        """
        choice = open_document(signed, ModelChoice, self._membership.owner_key)
        if choice.fleet != self._membership.fleet:
            raise UntrustedError(f"a choice of models for fleet {choice.fleet!r}")
        effect = self._finished.choose(choice)
        if effect is None:
            return False
        LOG.info("the owner's choice of models: %s", effect, extra={"kv": {"run": choice.run or "newest"}})
        return True

    def warn(self, doubts: Sequence[str]) -> None:
        """Log doubts about the samples or a finished model, and show them in the status file; each run begins without any."""
        found = list(self._figures.get("warnings", ()))
        for doubt in doubts:
            if doubt not in found:
                LOG.warning("%s", doubt)
                found.append(doubt)
        if found:
            self._figures["warnings"] = found

    def note(
        self,
        announcement: Announcement,
        assignment: Assignment,
        result: Finished,
        models: Mapping[int, Float32Vector],
        now_s: float,
    ) -> None:
        """Record the result of a round, and at the end of a run save its models.

        ``models`` are (d + p,) float32 by id, with the device's private coordinates.
        """
        self._figures.pop("skipped", None)
        if assignment.phase == Phase.STATISTICS:
            self._figures.update(rounds=self._figures.get("rounds", 0) + 1, round=announcement.round)
            return
        rounds = self._figures.get("rounds", 0) + 1
        self._figures.update(rounds=rounds, round=announcement.round, cluster=result.model, loss=result.loss)
        if result.tested:
            self._figures["accuracy"] = result.correct / result.tested
        if announcement.finished or assignment.train:
            theta = models[result.model]
            self._own = OwnModel(announcement.run, announcement.run_id, announcement.round, result.model, theta)
        if announcement.finished:
            self.save_model(now_s, durable=True)
            path = sorted(models) if assignment.phase == Phase.KEEP else []
            if path:
                self._figures["path"] = path
            self._add_finished(announcement, result, models, path)
            self.warn(result.doubts)

    def renew(self, announcement: Announcement, thetas: Mapping[int, Float32Vector]) -> None:
        """Let the newest model be that of its cluster in the round that begins, so that the one before need not stay in memory.

        ``thetas`` are (d,) float32 by id. A model with private coordinates stays until its next training has ended.
        """
        own = self._own
        theta = None if own is None else thetas.get(own.cluster)
        if own is not None and theta is not None and own.run_id == announcement.run_id and len(theta) == len(own.theta):
            self._own = dataclasses.replace(own, round=announcement.round, theta=theta)

    def skip(self, announcement: Announcement, error: ShoalError) -> None:
        """Record why the device takes no part in a round, until it takes part in one again."""
        self._figures["skipped"] = f"round {announcement.round}: {error}"

    def _add_finished(
        self, announcement: Announcement, result: Finished, models: Mapping[int, Float32Vector], path: list[int]
    ) -> None:
        assert self._run is not None

        def model(cluster: int) -> OwnModel:
            return OwnModel(announcement.run, announcement.run_id, announcement.round, cluster, models[cluster])

        self._finished.add(
            model(result.model),
            [model(node) for node in path if node != result.model],
            self._run.bundle,
            algorithm=self._run.plan.recipe.algorithm,
            at_s=int(self._clock_s()),
            figures=result.validation,
            start=self._start(announcement.run_id),
        )

    def _start(self, run_id: bytes) -> bytes:
        """Return the run's signed plan and the figures of its start, without the task, which is stored beside them."""
        assert self._run is not None
        package = self._files.load_run()
        if package is None or self._run.plan.run_id != run_id:
            return b""
        return encode(dataclasses.replace(decode(package, RunPackage), task=b""))

    def lacks_final_model(self, mark: ReplayWatermark, plan: RunPlan) -> bool:
        """Whether the watermark is in the final round of ``plan``, but the final model is not on disk."""
        return (mark.run, mark.round) == (plan.run, plan.recipe.rounds + 1) and self._finished.of_run(
            plan.run_id
        ) is None

    def keep_up(self, now_s: float) -> None:
        """Save the newest model if the last save is longer ago than SAVE_MODEL_EVERY_S."""
        if now_s - self._saved_model_s > SAVE_MODEL_EVERY_S:
            self.save_model(now_s, durable=False)

    def save_model(self, now_s: float, *, durable: bool) -> None:
        """Save the newest model, if there is one that is not saved durably yet."""
        if self._own is not None:
            self._files.save_model(self._own, durable=durable)
            self._saved_model_s = now_s
            # A save without sync may be lost in a power cut, so the model stays due for a durable one.
            self._own = None if durable else self._own

    def finish(self, plan: RunPlan, session: DeviceSession, now_s: float) -> bool:
        """Close the figures of a run unless that happened before a restart; return whether its end was not reported yet."""
        told = self._files.was_told(plan.run_id)
        if told:
            LOG.info("waiting for the next run", extra={"kv": {"after": plan.run}})
        else:
            self._untold = plan.run_id
        if not self._figures.get("finished"):
            self._close(plan, session, now_s)
        return not told

    def remember_end(self) -> None:
        """Record, durably, that the end of the run was reported, if it has ended."""
        if self._untold:
            self._files.save_told(self._untold)
            self._untold = b""

    def _close(self, plan: RunPlan, session: DeviceSession, now_s: float) -> None:
        self._count_bytes()
        self._figures["finished"] = True
        earlier = list(self._ended.items())[1 - RUNS_REMEMBERED :]
        self._ended = {**dict(earlier), str(plan.run): dict(self._figures)}
        self.publish(session, now_s, force=True)
        LOG.info("run finished", extra={"kv": {"run": plan.run, **self._figures}})

    def connected(self, broker: str, expires_at_s: int | None = None) -> None:
        """Note for the status file that the broker at this address, without user and password, accepted the connection.

        ``expires_at_s`` is the unix time at which its certificate expires; None without TLS.
        """
        until = {} if expires_at_s is None else {"certificate_expires_at_s": expires_at_s}
        self._connection = {"connected": True, "broker": broker, "since": second(int(self._clock_s())), **until}

    @property
    def is_connected(self) -> bool:
        """Whether the broker has accepted the connection and it has not ended."""
        return self._connection.get("connected") is True

    def disconnected(self, broker: str, reason: str) -> None:
        """Note for the status file that the connection to the broker has ended, or that an attempt to connect has failed."""
        since = (
            self._connection["since"] if self._connection.get("connected") is False else second(int(self._clock_s()))
        )
        self._connection = {"connected": False, "broker": broker, "since": since, "reason": reason}

    def state_line(self, session: DeviceSession) -> str:
        """Return what the device does now, as one line for people."""
        if not self._connection.get("connected"):
            return f"not connected to {self._connection['broker']}" if self._connection else "connecting"
        if session.plan is None:
            return f"fleet {self._membership.fleet}: waiting for a run"
        run = f"fleet {self._membership.fleet}, run {session.plan.run}"
        if session.stopped:
            return f"{run}: stopping"
        return f"{run}, round {session.round.mark.round}: {session.round.stage.value}"

    def keep_status(self, session: DeviceSession, now_s: float) -> None:
        """Write the status file if session or connection has changed: a device that is stuck shows what it waits for."""
        if not self._is_due(now_s):
            return
        if session.summary() != self._summary or self._connection != self._written_connection:
            self.publish(session, now_s)
        elif now_s - self._saved_status_s >= ALIVE_EVERY_S:
            self._saved_status_s = now_s
            self._files.touch_status()

    def publish(self, session: DeviceSession, now_s: float, *, force: bool = False) -> None:
        """Write the figures to the status file, at most once every STATUS_EVERY_S seconds unless forced."""
        if not force and not self._is_due(now_s):
            return
        self._saved_status_s = now_s
        self._summary = session.summary()
        self._written_connection = self._connection
        self._count_bytes()
        own = None if self._run is None else self._run.bundle.manifest.trainer
        self._files.save_status(
            {
                "device": self._membership.name,
                "fleet": self._membership.fleet,
                "stage": session.round.stage.value,
                "torch_loaded": "torch" in sys.modules,
                **self._executor,
                **({"executor": f"{own.name}:{own.version}"} if own is not None else {}),
                **({"order": session.order} if session.order else {}),
                **self._clock,
                **self._figures,
                **self._refused,
                **(
                    {"left_out": {**dataclasses.asdict(self._left_out), "words": str(self._left_out)}}
                    if self._left_out.count
                    else {}
                ),
                "session": self._summary,
                "connection": self._connection,
                "ended": self._ended,
            }
        )

    def _is_due(self, now_s: float) -> bool:
        return now_s - self._saved_status_s >= STATUS_EVERY_S

    def _count_bytes(self) -> None:
        if self._figures.get("finished"):
            return
        sent, received = self._transport.bytes_sent - self._base[0], self._transport.bytes_received - self._base[1]
        self._figures.update(bytes_up=sent, bytes_down=received)
