"""Rosters and checkpoints made by hand, with real keys."""

import hashlib

from crypto.seal.identity import Identity
from crypto.seal.signed import sign_document
from shoal.protocol.documents import Roster
from shoal.protocol.epochs import Checkpoint

DEVICES = ("dev-1", "dev-2", "dev-3", "dev-4")
NEXT_KEY = b"n" * 16
SEALED = b"origins, sealed for devices only"
OWNER = Identity.generate("owner")
IDENTITIES = {d: Identity.generate(d) for d in (*DEVICES, "dev-5", "dev-6", "dev-7")}
FOREVER = 2**40


def make_roster(devices=DEVICES, *, sequence=3, revoked=(), keys_since=0, fleet="demo", owner=OWNER):
    """Return (roster, the same as the owner signed it)."""
    members = tuple(IDENTITIES[d].member for d in devices)
    aggregator = Identity.generate("aggregator").member
    roster = Roster(
        fleet=fleet,
        sequence=sequence,
        issued_at_s=0,
        expires_at_s=FOREVER,
        aggregator=aggregator,
        devices=members,
        revoked=tuple(revoked),
        keys_since=keys_since,
    )
    return roster, sign_document(owner, roster)


def make_checkpoint(run, round_=2, sealed=SEALED, **changes):
    """Return the checkpoint that a device signs after folding one model after ``round_``."""
    fields = {
        "fleet": run.fleet,
        "run_id": run.run_id,
        "round": round_,
        "epoch": 1,
        "next_epoch": 2,
        "generation": 0,
        "key_id": NEXT_KEY,
        "origins": 1,
        "digest": hashlib.sha256(sealed).digest(),
    }
    return Checkpoint(**{**fields, **changes})
