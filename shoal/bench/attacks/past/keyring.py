"""Every key that follows from stolen secrets, tried on recorded uploads.

The kind of a stolen string is not known, so each is tried as the mask secret of a mask epoch or of a round, as the secret of a
run's chain at any round, and as that of a key version at any run. An upload names its mask by a key id, which tells a thief
whether a derived secret is the right one. From a right one all later secrets of its kind are derived as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from crypto.mask.derivation import MaskKey, derive, key_id
from crypto.mask.masking import unmask
from crypto.mask.schedule import RunChain, VersionKey
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import SealError, open_from_member, read_head
from shoal.bench.attacks.past.recording import SeenUpload
from shoal.bench.attacks.past.theft import Loot
from shoal.protocol.codec import decode
from shoal.protocol.documents import DeviceGrant, GrantFile, RunPlan
from shoal.types import Float32Vector, MaskedVector

EPOCHS: Final = 3
"""Mask epochs by which a mask secret is stepped on."""


class Keyring:
    """Finds the masks of recorded uploads of one run.

    Args:
        uploads: as the aggregator has them.
        plan: the run's plan, which the aggregator has.
    """

    def __init__(self, uploads: Iterable[SeenUpload], plan: RunPlan) -> None:
        self._plan = plan
        self._wanted = {u.key_id: u.context for u in uploads}
        self._rounds: dict[int, dict[int, bytes]] = defaultdict(dict)
        if plan.keys == "round":
            for name, context in self._wanted.items():
                self._rounds[context.key_version][context.round] = name

    def masks(self, loot: Loot, grants: Sequence[bytes] = ()) -> dict[bytes, MaskKey]:
        """Return the masks that follow from ``loot``, by key id.

        Args:
            loot: of one device.
            grants: recorded grants to the device.
        """
        found = {key.key_id: key for key in loot.masks if key.key_id in self._wanted}
        for secret in loot.secrets | secrets_in(loot, grants):
            for name, mask_secret in self._from(secret):
                if name not in found:
                    found[name] = derive(mask_secret, self._wanted[name])
        return found

    def _from(self, secret: bytes) -> Iterator[tuple[bytes, MaskSecret]]:
        """Return (key id, mask secret) of each upload's mask that follows from 32 bytes."""
        steps = [MaskSecret.from_bytes(secret)]
        for _ in range(0 if self._rounds else EPOCHS):
            steps.append(steps[-1].ratchet())
        for name, context in self._wanted.items():
            yield from ((name, step) for step in steps if key_id(step, context) == name)
        for version, rounds in self._rounds.items():
            for chain in self._chains(secret, version, rounds):
                yield from self._along(chain, rounds)

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

    def _along(self, chain: RunChain, rounds: dict[int, bytes]) -> Iterator[tuple[bytes, MaskSecret]]:
        """Return what a chain gives from its next round on, nothing if that round's key id is not the one recorded."""
        for round_ in sorted(r for r in rounds if r >= chain.next_round):
            chain.skip_to(round_)
            keys = chain.take()
            if key_id(keys.mask, self._wanted[rounds[round_]]) != rounds[round_]:
                return
            yield rounds[round_], keys.mask


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
            grant = decode(plain, DeviceGrant)
            found.add(grant.version_secret)
    return found
