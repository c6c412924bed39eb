"""Uploads of past rounds, opened by a newcomer, by a thief with a device in step, and with a device that was absent.

Forward secrecy: Günther, "An Identity-Based Key-Exchange Protocol" (1989). A fleet of four devices runs six rounds with real
keys and messages. One device is switched off in round 3; another is stolen in round 4, and a fifth is admitted after it. The
attacker has a record of all traffic and the aggregator's keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import MaskKey
from edge_client.learning.data import Dataset
from shoal.owner.runs.plan import RunOptions
from shoal.protocol.topics import TopicKind, parse
from shoal.simulation.loopback_fleet import LoopbackFleet
from shoal.transport.faults import Hop, Passage
from shoal_lab.bench.attacks.base import Attack, Result, cosine
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Lab
from shoal_lab.bench.attacks.past.keyring import Keyring, opened
from shoal_lab.bench.attacks.past.recording import (
    Masking,
    SeenUpload,
    Tap,
    quiet_fleet,
    recorded_grants,
    recorded_uploads,
    watched_masking,
)
from shoal_lab.bench.attacks.past.theft import Loot, steal

DEVICES: Final = 4
ROUNDS: Final = 6
SAMPLES: Final = 20
LEFT: Final = 3
"""Round in which the absent device is switched off; it holds that round's keys."""
STOLEN: Final = 4
"""Round in which a device is stolen, as its upload leaves; the newcomer is admitted after it."""
OPEN: Final = 0.999
"""Cosine with the clear update from which an upload counts as opened."""
WITHIN_S: Final = 3000.0
VICTIM, ABSENT, NEWCOMER = "dev-01", "dev-02", f"dev-{DEVICES:02d}"
RECORD: Final = "with all that aggregator and broker recorded"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The recorded uploads of a fleet, and the masks that thieves derive.

    Attributes:
        uploads: all masked updates; before: those before the newcomer's admission.
        masks: device -> the masks that follow from its stolen secrets, by key id.
        truth: the clear updates, by the digest of the masked ones.
    """

    uploads: list[SeenUpload]
    before: list[SeenUpload]
    masks: dict[str, dict[bytes, MaskKey]]
    truth: dict[bytes, Masking] = field(repr=False)

    def share(self, device: str, uploads: list[SeenUpload]) -> float:
        """Return the share of ``uploads`` that the loot of a device opens."""
        vectors = ((opened(u, self.masks[device]), self.truth[u.digest].clear) for u in uploads)
        return sum(cosine(vector, clear) > OPEN for vector, clear in vectors) / len(uploads)

    def rounds(self, first: int, last: int) -> list[SeenUpload]:
        """Return the uploads of rounds ``first`` to ``last``."""
        return [u for u in self.uploads if first <= u.round <= last]


class Ambush(Tap):
    """Records every message, and calls ``strike`` once as a device's next upload leaves, if it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.loot: Loot | None = None
        self._client = ""
        self._strike: Callable[[], Loot] | None = None

    def arm(self, client: str, strike: Callable[[], Loot]) -> None:
        """Steal with ``strike`` at the next upload of an MQTT client."""
        self._client, self._strike = client, strike

    def __call__(self, passage: Passage) -> Sequence[float]:
        """Record ``passage``, and deliver it once, at once."""
        sent = passage.hop is Hop.UP and passage.client == self._client
        if self._strike is not None and sent and parse(passage.topic).kind is TopicKind.UP:
            strike, self._strike = self._strike, None
            self.loot = strike()
        return super().__call__(passage)


def evidence(lab: Lab, mode: str, stolen: int = STOLEN) -> Evidence:
    """Run a fleet, steal from it in round ``stolen``, and admit the newcomer after that round."""
    data = fleet_data(lab)
    joining = data.pop(NEWCOMER)
    options, tap = fleet_options(mode, ROUNDS), Ambush()
    with (
        quiet_fleet(),
        watched_masking() as truth,
        tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder,
        LoopbackFleet(Path(folder), lab.bundle, data, options, tap, origins=lab.origin[None].copy()) as fleet,
    ):

        def take(name: str) -> Loot:
            running = fleet.devices.get(name)
            return steal(fleet.stage.device_dir(name), running.runtime if running else None)

        for done in range(1, ROUNDS):
            if done == stolen:
                tap.arm(fleet.client_id(VICTIM), lambda: take(VICTIM))
            if done == LEFT:
                fleet.kill_device(ABSENT)
            if done == stolen + 1:
                admitted = len(tap.heard)
                fleet.add_device(NEWCOMER, joining)
                admission = take(NEWCOMER)
            run_rounds(fleet, done)
        fleet.run(WITHIN_S)
        assert tap.loot is not None
        loots = {VICTIM: tap.loot, NEWCOMER: admission | take(NEWCOMER), ABSENT: take(ABSENT)}
        aggregator, plan = AggregatorMembership(fleet.stage.aggregator_dir), fleet.plan
        uploads, before = (recorded_uploads(heard, aggregator) for heard in (tap.heard, tap.heard[:admitted]))
    ring = Keyring(uploads, plan)
    masks = {name: ring.masks(loot, recorded_grants(tap.heard, name)) for name, loot in loots.items()}
    return Evidence(uploads, before, masks, truth)


def fleet_options(mode: str, rounds: int) -> RunOptions:
    """Return the options of a FedAvg run that goes on while devices are away."""
    return RunOptions(
        "fedavg",
        rounds=rounds,
        mode=mode,
        local=ONE_EPOCH,
        min_contributors=2,
        quorum=0.5,
        deadline_s=30.0,
        seed=0,
    )


def fleet_data(lab: Lab) -> dict[str, Dataset]:
    """Return the samples of each device, the newcomer's included."""
    picked = {f"dev-{i:02d}": lab.pick(f"past {i}", SAMPLES) for i in range(DEVICES + 1)}
    return {name: Dataset(images.x, images.y) for name, images in picked.items()}


def run_rounds(fleet: LoopbackFleet, count: int) -> None:
    """Step until ``count`` rounds have closed."""
    fleet.run_until(lambda: len(fleet.records()) >= count, WITHIN_S)


def evidence_of(lab: Lab, mode: str) -> Evidence:
    """Return the evidence of a fleet, which both attacks use; it is made once."""
    return lab.once(("past rounds", mode), lambda: evidence(lab, mode))


def past(lab: Lab, mode: str) -> list[Result]:
    """Return the shares of past updates that a newcomer and a thief open."""
    found = evidence_of(lab, mode)
    return [
        _result(
            "past-rounds-newcomer",
            f"device admitted after round {STOLEN}, {RECORD}",
            found.share(NEWCOMER, found.before),
            f"{len(found.before)} updates from before its admission",
        ),
        _result(
            "past-rounds-stolen",
            f"thief with disk and memory of a device in step at round {STOLEN}, {RECORD}",
            found.share(VICTIM, found.rounds(1, STOLEN - 1)),
            f"updates of rounds before {STOLEN}",
        ),
    ]


def since(lab: Lab, mode: str) -> list[Result]:
    """Return the shares of updates that devices open from the round on whose keys they hold; no claim is made about these."""
    found = evidence_of(lab, mode)
    before = found.share(ABSENT, found.rounds(1, LEFT - 1))
    return [
        _result(
            "past-rounds-absent",
            f"thief with the disk of a device last in step at round {LEFT}, {RECORD}",
            found.share(ABSENT, found.rounds(LEFT, ROUNDS)),
            f"updates of rounds {LEFT} to {ROUNDS}; {before:.2f} of those before",
        ),
        _result(
            "colluding-device",
            f"aggregator with disk and memory of a device in step at round {STOLEN}, {RECORD}",
            found.share(VICTIM, found.rounds(STOLEN, ROUNDS)),
            f"updates of rounds {STOLEN} to {ROUNDS}",
        ),
    ]


def _result(name: str, attacker: str, success: float, note: str) -> Result:
    return Result(
        name=name,
        attacker=attacker,
        success=success,
        chance=0.0,
        unit="share",
        margin=0.0,
        note=note,
        keys="round",
        devices=DEVICES,
    )


SOURCE: Final = "Günther 1989 (forward secrecy)"
PAST: Final = Attack("past rounds", SOURCE, f"newcomer, or thief of a device, {RECORD}", past)
SINCE: Final = Attack("rounds since", SOURCE, f"thief of an absent device, or device in step, {RECORD}", since)
