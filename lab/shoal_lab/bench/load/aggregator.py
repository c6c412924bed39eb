"""`shoal bench aggregator`: CPU time of a round of many devices in the aggregator's service, and in its engine alone.

No device runs: presences and uploads are made beforehand (`shoal_lab.bench.load.replay`) and are handed to the service that the
daemon drives, on a loopback broker without other clients. Seals and signatures are checked, updates are durable before they are
answered, and the strategy closes the round. It leaves out the daemon's event queue, MQTT and the broker, acknowledgements on the
wire, reminders and all waiting; `shoal bench load` measures those, with the real processes.

The engine's times are without message, seal or disk. They are about the same in a small and in a large fleet, since no event of
the engine looks at all devices.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from aggregator.numerics.backend import select
from aggregator.rounds.engine import Engine
from aggregator.rounds.events import CameOnline
from aggregator.run_service import RunService
from aggregator.storage.run_status import rounds_closed
from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.registry import make_strategy
from shoal.errors import UsageError
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.documents import RunPlan
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from shoal.transport.inbox import BATCH_EVENTS
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
from shoal_lab.bench.load.fleet_load import FleetPlace, run_options
from shoal_lab.bench.load.replay import Item, presences, rehearse

ROUNDS: Final = 4
"""Measured rounds; the first is left out, since it also creates the store."""
SIZES: Final = (100, 1000, 5000)
ENGINE_SIZES: Final = (300, 10_000)
STEP_S: Final = 1e-3
"""Seconds by which the service's clock advances with each message."""


class Crowd(FleetPlace):
    """A fleet whose devices are keys in one process, and its aggregator's service.

    Attributes:
        uploads: of each round, as `rehearse` makes them.
    """

    def __init__(self, root: Path, devices: int, algorithm: str) -> None:
        super().__init__(
            root, root / "devices", "mqtt://loopback", size=devices, options=run_options(algorithm, ROUNDS)
        )
        self._topics = Topics(self.plan.fleet)
        self._broker = LoopbackBroker()
        self._transport = LoopbackTransport(self._broker, "aggregator", lambda _event: None)
        self._service = RunService(
            AggregatorMembership(self.aggregator_dir),
            self.plan,
            next((self.aggregator_dir / aggregators.RUNS_DIRECTORY).iterdir()).read_bytes(),
            self._transport,
            self.aggregator_dir,
            backend=select("cpu", work_flops=2.0 * devices**2 * self.plan.length),
        )
        self.uploads = rehearse(self, groups=1)
        self._now_s = 0.0
        self._transport.start()
        self._service.start(0.0)

    def take(self, items: Iterable[Item], round_: int = 0) -> float:
        """Hand prepared messages of a round to the service as its daemon would, presences in round 0; return CPU seconds."""
        channel, topic = (channels.UPLOAD, self._topics.up) if round_ else (channels.PRESENCE, self._topics.state)
        messages = [
            Message(topic(item.device), chunk)
            for item in items
            for chunk in split(item.payload, kind=channel.kind, round=round_)
        ]
        begin = time.process_time()
        for first in range(0, len(messages), BATCH_EVENTS):
            for message in messages[first : first + BATCH_EVENTS]:
                self._now_s += STEP_S
                self._service.on_event(message, self._now_s)
            self._service.flush(self._now_s)
            self._service.tick(self._now_s)
        spent = time.process_time() - begin
        self._broker.pump()  # the loopback broker's work is not the aggregator's
        return spent

    @property
    def published_bytes(self) -> int:
        """Bytes that the aggregator has published so far: models, announcements and answers, each counted once."""
        return self._transport.bytes_sent

    def close(self) -> None:
        """Close the service's files."""
        self._service.close()


def measure(sizes: Sequence[int] = SIZES, algorithm: str = "fedavg") -> dict[str, Any]:
    """Return the CPU times of a round, an upload and a presence, on one thread, for fleets of each size and for the engine.

    Raises:
        UsageError: a round did not close.
    """
    loads = [_load(devices, algorithm) for devices in sizes]
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder:
        crowd = Crowd(Path(folder), 1, algorithm)
        crowd.close()
    return {
        "algorithm": algorithm,
        "loads": loads,
        "engine": [_engine(crowd.plan, devices) for devices in ENGINE_SIZES],
    }


def _load(devices: int, algorithm: str) -> dict[str, Any]:
    rounds_s, published = [], []
    with tempfile.TemporaryDirectory(prefix="shoal-load-") as folder:
        crowd = Crowd(Path(folder), devices, algorithm)
        try:
            presences_s = crowd.take(presences(crowd))
            for round_, items in islice(crowd.uploads, ROUNDS):
                before = crowd.published_bytes
                rounds_s.append(crowd.take(items, round_))
                published.append(crowd.published_bytes - before)
                if rounds_closed(crowd.run_dir) != round_:
                    raise UsageError(f"round {round_} did not close")
        finally:
            crowd.close()
    seconds = median(rounds_s[1:])
    return {
        "devices": devices,
        "algorithm": algorithm,
        "update_bytes": crowd.model_bytes,
        "cpu_ms_per_presence": 1e3 * presences_s / devices,
        "cpu_seconds_per_round": seconds,
        "cpu_ms_per_upload": 1e3 * seconds / devices,
        "published_bytes_per_round": published[1],
    }


def _engine(plan: RunPlan, devices: int) -> dict[str, Any]:
    engine, names = Engine(plan, make_strategy(plan), bytes(16)), tuple(f"dev-{i:05}" for i in range(devices))
    state, _ = engine.begin(names)
    begin = time.process_time()
    for name in names[:-1]:
        state, _ = engine.handle(state, CameOnline(name))
    presences_s = time.process_time() - begin
    state, _ = engine.handle(state, CameOnline(names[-1]))
    assert state.plan is not None
    # All but the last: that one closes the round, which is the strategy's work and not the engine's.
    uploads = [
        ClientUpdate(
            round=1,
            phase=assignment.phase,
            device=name,
            model=assignment.candidates[0],
            samples=10,
            loss=1.0,
            key_id=bytes(16),
            digest=bytes(32),
        )
        for name, assignment in list(state.plan.assignments.items())[:-1]
    ]
    begin = time.process_time()
    for upload in uploads:
        state, _ = engine.handle(state, upload)
    uploads_s = time.process_time() - begin
    return {
        "devices": devices,
        "us_per_presence": 1e6 * presences_s / devices,
        "us_per_upload": 1e6 * uploads_s / max(1, len(uploads)),
    }


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    return [
        f"{'devices':>7} {'CPU s a round':>14} {'CPU ms an upload':>17} {'CPU ms a presence':>18} {'bytes published':>16}",
        *(
            f"{d['devices']:7} {d['cpu_seconds_per_round']:14.3f} {d['cpu_ms_per_upload']:17.2f} "
            f"{d['cpu_ms_per_presence']:18.2f} {d['published_bytes_per_round']:16}"
            for d in data["loads"]
        ),
        "the engine's rules alone, without messages, seals and disk:",
        *(
            f"{d['devices']:7} devices: {d['us_per_presence']:.1f} us a presence, {d['us_per_upload']:.1f} us an upload"
            for d in data["engine"]
        ),
    ]
