"""Uploads of past rounds, opened with stolen secrets, on a loopback fleet with real keys and messages.

A fleet of four devices runs six rounds. One device is switched off in round 3; another is stolen in round 4, and a fifth is
admitted after it. The attacker has a record of all traffic and the aggregator's keys. Forward secrecy: Günther, "An
Identity-Based Key-Exchange Protocol" (1989).

- `steal` collects all strings of 32 bytes in a device's files and memory, its private keys, and its derived masks.
- `Keyring` derives every key that follows from them, and tries it on the recorded uploads.
- `restored` runs two fleets from one backup of the owner's directory, and counts the masks that both use.

Example: the newcomer's grant holds the secret of the key version that was drawn for it, and the keyring opens the uploads since.
"""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import MaskContext, MaskKey, derive, key_id
from crypto.mask.kdf import SECRET_BYTES
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import RoundKeys, RunChain, VersionKey
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import SealError, open_from_member, read_head
from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from edge_client.learning.data import Dataset
from edge_client.runtime import DeviceRuntime
from shoal.membership.directory import KEY_FILE, RECEIVING_FILE
from shoal.protocol.codec import decode
from shoal.protocol.documents import DeviceGrant, GrantFile, RunPlan
from shoal.protocol.recipe import Recipe
from shoal.protocol.topics import TopicKind, parse
from shoal.simulation.process_fleet import Stage
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.broker import (
    Masking,
    SeenUpload,
    Tap,
    quiet_fleet,
    recorded_grants,
    recorded_uploads,
    watched_masking,
)
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Attack, Lab, Result, cosine
from shoal_lab.loopback.fleet import BROKER_URL, LoopbackFleet
from shoal_lab.loopback.transport import Hop, LoopbackBroker, LoopbackTransport, Passage

LARGEST_FILE: Final = 1000
"""Bytes of the largest file that is searched at every offset: larger ones hold sealed bytes, vectors, or receiving keys."""
PUBLIC: Final = ("roster.*", "*.card", "status.json")
OUTSIDE: Final = (ModuleType, type, LoopbackFleet, LoopbackBroker, LoopbackTransport)
"""Objects of this process that are no part of the device's memory, and lead out of it."""


@dataclass(frozen=True, slots=True, repr=False)
class Loot:
    """The secrets taken from one device.

    Attributes:
        identity: the device's keys.
        secrets: strings of 32 bytes, each of which may be a secret of any kind.
        privates: keys that may open grants.
        masks: derived masks in its memory.
    """

    identity: Identity
    secrets: frozenset[bytes]
    privates: tuple[X25519PrivateKey, ...]
    masks: tuple[MaskKey, ...] = field(default=())

    def __or__(self, other: Loot) -> Loot:
        """Return the secrets taken from one device at two times."""
        return Loot(
            self.identity,
            self.secrets | other.secrets,
            (*self.privates, *other.privates),
            (*self.masks, *other.masks),
        )


def steal(directory: Path, runtime: DeviceRuntime | None = None) -> Loot:
    """Return the secrets in a device's directory and, if it is running, in its memory."""
    identity = Identity.load(directory / KEY_FILE)
    receiving = ReceivingSecrets.load(directory / RECEIVING_FILE)
    secrets, masks = set(_in_files(directory)), []
    for thing in _in_memory(runtime) if runtime is not None else ():
        if isinstance(thing, MaskKey):
            masks.append(thing)
        else:
            secrets.add(bytes(thing))
    return Loot(identity, frozenset(secrets), (identity.seal_private, *receiving.privates), tuple(masks))


def _in_files(directory: Path) -> Iterator[bytes]:
    for path in directory.rglob("*"):
        if path.is_file() and not any(path.match(pattern) for pattern in PUBLIC):
            data = path.read_bytes()
            if len(data) <= LARGEST_FILE:
                yield from (data[at : at + SECRET_BYTES] for at in range(len(data) - SECRET_BYTES + 1))


def _in_memory(root: object) -> Iterator[bytes | MaskKey]:
    """Return the derived masks and the strings of 32 bytes among the objects that ``root`` leads to."""
    seen, stack = set[int](), [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, OUTSIDE):
            continue
        seen.add(id(thing))
        if isinstance(thing, bytes):
            if len(thing) == SECRET_BYTES:
                yield thing
        elif isinstance(thing, FunctionType):
            # Not its globals, through which everything in this process can be reached.
            stack += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            if isinstance(thing, MaskKey):
                yield thing
            stack += gc.get_referents(thing)


class Keyring:
    """Finds the masks of recorded uploads of one run.

    The kind of a stolen string is not known, so each is tried as the mask secret of a round, as the secret of a run's chain at
    any round, and as that of a key version at any run. An upload names its mask by a key id, which tells a thief whether a
    derived secret is the right one. From a right one all later secrets of its kind are derived as well.

    Args:
        uploads: as the aggregator has them.
        plan: the run's plan, which the aggregator has.
    """

    def __init__(self, uploads: Iterable[SeenUpload], plan: RunPlan) -> None:
        self._plan = plan
        self._wanted: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._follows = cache(lambda secret: tuple(self._from(secret)))
        for upload in uploads:
            self._wanted[upload.head.key_version][upload.head.round] = upload.head.key_id

    def masks(self, loot: Loot, grants: Sequence[bytes] = ()) -> dict[bytes, MaskKey]:
        """Return the masks that follow from ``loot``, by key id.

        Args:
            loot: of one device.
            grants: recorded grants to the device.
        """
        wanted = {name for rounds in self._wanted.values() for name in rounds.values()}
        found = {key.key_id: key for key in loot.masks if key.key_id in wanted}
        for secret in loot.secrets | secrets_in(loot, grants):
            for keys in self._follows(secret):
                context = self._context(keys)
                name = key_id(keys.mask, context)
                if name not in found:
                    found[name] = derive(keys.mask, context)
        return found

    def _from(self, secret: bytes) -> Iterator[RoundKeys]:
        """Return the keys of each round of an upload that follow from 32 bytes."""
        for version, rounds in self._wanted.items():
            for round_ in rounds:
                as_mask = RoundKeys(
                    fleet=self._plan.fleet,
                    run_id=self._plan.run_id,
                    key_version=version,
                    round=round_,
                    mask=MaskSecret.from_bytes(secret),
                    content=bytes(32),
                )
                if self._is_wanted(as_mask):
                    yield as_mask
            for chain in self._chains(secret, version, rounds):
                yield from self._along(chain, rounds)

    def _context(self, keys: RoundKeys) -> MaskContext:
        return keys.context(self._plan.task_digest, self._plan.recipe.mode, self._plan.mask_segments)

    def _is_wanted(self, keys: RoundKeys) -> bool:
        return key_id(keys.mask, self._context(keys)) == self._wanted[keys.key_version][keys.round]

    def _chains(self, secret: bytes, version: int, rounds: Iterable[int]) -> Iterator[RunChain]:
        plan = self._plan
        for at in rounds:
            yield RunChain(plan.fleet, plan.run_id, version, at, secret)
        for run in range(1, plan.run + 1):
            key = VersionKey(plan.fleet, version, secret, next_run=run)
            key.skip_to_run(plan.run)
            chain = key.begin_run(plan.run_id)
            chain.skip_to(min(rounds))
            yield chain

    def _along(self, chain: RunChain, rounds: Iterable[int]) -> Iterator[RoundKeys]:
        """Return what a chain gives from its next round on, nothing if that round's key id is not the one recorded."""
        for round_ in sorted(r for r in rounds if r >= chain.next_round):
            chain.skip_to(round_)
            keys = chain.take()
            if not self._is_wanted(keys):
                return
            yield keys


def opened(upload: SeenUpload, masks: dict[bytes, MaskKey]) -> Float32Vector:
    """Return an upload's vector (d,) without its mask if the mask is among ``masks``, else as it was sent."""
    key = masks.get(upload.head.key_id)
    return upload.masked if key is None else unmask(MaskedVector(upload.masked, key.key_id), key)


def secrets_in(loot: Loot, grants: Sequence[bytes]) -> set[bytes]:
    """Return the secrets in those recorded grants that a stolen private key opens."""
    found: set[bytes] = set()
    for data in grants:
        file = decode(data, GrantFile)
        head, at = read_head(file.sealed)
        for private in loot.privates:
            try:
                plain, _ = open_from_member(loot.identity, file.sealed, head, at, file.owner.sign_key, private=private)
            except SealError:
                continue
            found.add(decode(plain, DeviceGrant).version_secret)
    return found


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
        return [u for u in self.uploads if first <= u.head.round <= last]


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


def fleet_options(mode: str, rounds: int) -> Recipe:
    """Return the options of a FedAvg run that goes on while devices are away."""
    return Recipe(
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


SEES_BOTH_RUNS: Final = "aggregator that sees both runs of an owner whose directory was restored from a backup"
RESTORED_ROUNDS: Final = 3


def masks_used(lab: Lab, mode: str, stage: Stage) -> tuple[int, list[bytes]]:
    """Run a fleet from its directories; return the run's number, and each mask used as the bytes of one masked probe."""
    data = fleet_data(lab)
    del data[NEWCOMER]
    options = fleet_options(mode, RESTORED_ROUNDS)
    with (
        quiet_fleet(),
        watched_masking() as seen,
        LoopbackFleet(stage.root, lab.bundle, data, options, origins=lab.origin[None].copy(), stage=stage) as fleet,
    ):
        fleet.run(WITHIN_S)
        number = fleet.plan.run
    probe = lab.rng("restored owner").standard_normal(lab.length).astype(np.float32)
    keys = {masking.key.key_id: masking.key for masking in seen.values()}
    return number, [mask(probe, key).values.tobytes() for key in keys.values()]


def restored(lab: Lab, mode: str) -> list[Result]:
    """Return the number of masks of the restored owner's run that the run before had used."""
    names = tuple(sorted(fleet_data(lab).keys() - {NEWCOMER}))
    with tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder:
        stage = Stage(Path(folder, "owner-and-fleet"), BROKER_URL, names)
        backup = stage.copy_to(Path(folder, "backup"))
        (first, before), (second, after) = (masks_used(lab, mode, s) for s in (stage, backup))
    return [
        Result(
            name="restored-owner",
            attacker=SEES_BOTH_RUNS,
            success=float(sum(used in before for used in after)),
            chance=0.0,
            unit="masks",
            margin=0.0,
            note=f"repeated, of {len(after)} in run {second} after the restore; run {first} before had {len(before)}",
            keys="round",
            devices=len(names),
        )
    ]


ATTACKS: Final = (
    Attack("past rounds", "Günther 1989 (forward secrecy)", f"newcomer, or thief of a device, {RECORD}", past),
    Attack(
        "rounds since",
        "Günther 1989 (forward secrecy)",
        f"thief of an absent device, or device in step, {RECORD}",
        since,
    ),
    Attack("restored owner", "Ristenpart and Yilek 2010 (virtual machine resets)", SEES_BOTH_RUNS, restored),
)
