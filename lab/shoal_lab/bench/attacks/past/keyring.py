"""Every key that follows from stolen secrets, tried on recorded uploads.

The kind of a stolen string is not known, so each is tried as the mask secret of a round, as the secret of a run's chain at any
round, and as that of a key version at any run. An upload names its mask by a key id, which tells a thief whether a derived
secret is the right one. From a right one all later secrets of its kind are derived as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from crypto.mask.derivation import MaskContext, MaskKey, derive, key_id
from crypto.mask.masking import unmask
from crypto.mask.schedule import RoundKeys, RunChain, VersionKey
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import SealError, open_from_member, read_head
from shoal.protocol.codec import decode
from shoal.protocol.documents import DeviceGrant, GrantFile, RunPlan
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.past.recording import SeenUpload
from shoal_lab.bench.attacks.past.theft import Loot


class Keyring:
    """Finds the masks of recorded uploads of one run.

    Args:
        uploads: as the aggregator has them.
        plan: the run's plan, which the aggregator has.
    """

    def __init__(self, uploads: Iterable[SeenUpload], plan: RunPlan) -> None:
        self._plan = plan
        self._wanted: dict[int, dict[int, bytes]] = defaultdict(dict)
        for upload in uploads:
            self._wanted[upload.key_version][upload.round] = upload.key_id

    def masks(self, loot: Loot, grants: Sequence[bytes] = ()) -> dict[bytes, MaskKey]:
        """Return the masks that follow from ``loot``, by key id.

        Args:
            loot: of one device.
            grants: recorded grants to the device.
        """
        wanted = {name for rounds in self._wanted.values() for name in rounds.values()}
        found = {key.key_id: key for key in loot.masks if key.key_id in wanted}
        for secret in loot.secrets | secrets_in(loot, grants):
            for keys in self._from(secret):
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
        return keys.context(self._plan.task_digest, self._plan.mode, self._plan.mask_segments)

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
    key = masks.get(upload.key_id)
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
