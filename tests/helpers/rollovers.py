"""The end of a mask epoch without a fleet: an engine, a roster with real keys, and devices that fold and sign by hand."""

import dataclasses
import hashlib

import numpy as np

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.events import CameOnline, DeadlinePassed, KeysHeld, Rostered, Stored, WentOffline
from aggregator.strategies.base import contribution_of
from crypto.seal.identity import Identity
from crypto.seal.signed import sign_document
from shoal.membership.certificates import sign_checkpoint
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster
from shoal.protocol.epochs import Checkpoint, Endorsement, Proposal
from shoal.protocol.messages import Phase
from tests.helpers.plans import digest_of, engine_of, run_plan, upload_of

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
        "epoch": run.epoch,
        "next_epoch": run.epoch + 1,
        "generation": 0,
        "key_id": NEXT_KEY,
        "origins": 1,
        "digest": hashlib.sha256(sealed).digest(),
    }
    return Checkpoint(**{**fields, **changes})


def folded(checkpoint, carried=(), sealed=SEALED, *, told=None):
    """Return the attachment of the device that folds: vectors (d,) ``carried``, with ``told`` as their stated number."""
    rows = b"".join(np.asarray(row, "<f4").tobytes() for row in carried)
    return encode(Proposal(checkpoint, len(carried) if told is None else told, len(sealed))) + rows + sealed


def endorsed(signature=bytes(64), renewed=None):
    """Return the attachment of a device that compares; ``renewed`` are its own updates (d,) by round."""
    renewed = renewed or {}
    rows = b"".join(np.asarray(row, "<f4").tobytes() for row in renewed.values())
    return encode(Endorsement(signature, tuple(renewed))) + rows


class Scene:
    """A run whose devices answer when the test calls them.

    Attributes:
        engine, state: as `aggregator.rounds.engine` has them; actions: of the last event.
        seen: all actions so far.
    """

    def __init__(self, devices=DEVICES, *, begin=True, **changes):
        run = run_plan(**{"epoch_rounds": 2, "rounds": 6, "quorum": 1.0, **changes})
        self.engine = engine_of(run)
        self.roster, self.roster_bytes = make_roster(devices)
        self.seen, self.actions = [], ()
        if begin:
            self.state, _ = self.engine.begin(devices, 0, self.roster, self.roster_bytes)
            self.online(*devices)

    def feed(self, event):
        self.state, self.actions = self.engine.handle(self.state, event)
        self.seen.extend(self.actions)
        return self.kinds

    @property
    def kinds(self):
        """Names of the last event's actions."""
        return [type(a).__name__ for a in self.actions]

    @property
    def place(self):
        return (self.state.round, self.state.step)

    @property
    def opened(self):
        """The last round or step that was opened."""
        return next(a for a in reversed(self.seen) if type(a).__name__ == "OpenRound")

    def online(self, *devices):
        for device in devices:
            self.feed(CameOnline(device))

    def offline(self, *devices):
        for device in devices:
            self.feed(WentOffline(device))

    def deadline(self):
        return self.feed(DeadlinePassed(*self.place))

    def draw(self, generation, *, devices=DEVICES, revoked=(), keys=True):
        """The owner draws new secrets at roster ``generation``; with ``keys`` they have come too."""
        self.roster, self.roster_bytes = make_roster(
            devices, sequence=generation, revoked=revoked, keys_since=generation
        )
        self.feed(Rostered(self.roster, self.roster_bytes))
        if keys:
            self.feed(KeysHeld(generation))

    def upload(self, device, attached=b"", **changes):
        """Return (Upload, body), the answer of ``device`` to the open round or step."""
        s = self.state
        fields = {
            "nonce": self.engine.nonce(s.round, s.plan.step),
            "epoch": s.run.epoch,
            "key_id": s.run.key_id,
            "attached": len(attached),
            **changes,
        }
        return upload_of(self.engine, s, device, **fields)

    def send(self, device, attached=b"", **changes):
        """Let ``device``'s answer be judged and, once it is durable, seen by the engine."""
        upload, body = self.upload(device, attached, **changes)
        digest = digest_of(upload, body + attached)
        verdict, reason = self.engine.validate(self.state, upload, digest)
        assert verdict is Decision.STORE, reason
        vector = np.frombuffer(body, "<f4") if body else None
        return self.feed(Stored(contribution_of(upload, vector, None, attached), digest))

    def train(self, *devices):
        """The devices, by default all that are asked, answer the open round."""
        for device in devices or tuple(self.state.plan.assignments):
            self.send(device)

    def checkpoint(self, **changes):
        """Return the checkpoint that is due."""
        r = self.state.rollover
        fresh = r.generation != self.state.generation
        fields = {
            "generation": r.generation,
            "next_epoch": self.state.run.epoch + (10 if fresh else 1),
            "key_id": bytes([self.state.run.epoch]) * 16,
            "origins": len(self.opened.plan.models),
            **changes,
        }
        return make_checkpoint(self.state.run, self.state.round, **fields)

    def fold(self, **changes):
        """The device that is asked folds."""
        (device,) = self.state.plan.assignments
        assert self.state.plan.assignments[device].phase == Phase.CHECKPOINT
        self.folded = self.checkpoint(**changes)
        self.send(device, folded(self.folded))
        return device

    def sign(self, *devices, checkpoint=None):
        """Let the devices sign the proposed checkpoint."""
        for device in devices:
            signature = sign_checkpoint(IDENTITIES[device], checkpoint or self.folded)
            self.send(device, endorsed(signature))

    def object_(self, *devices):
        """The devices have compared, and don't sign."""
        for device in devices:
            self.send(device, endorsed())

    def due(self):
        """Do rounds until a rollover is due."""
        while self.state.plan is not None and not self.state.plan.step and not self.state.plan.final:
            self.train()
        return self

    def events(self, kind):
        """Return the recorded events of a kind, as `noted`."""
        return [e for e in self.state.news if e.kind == kind]


def dropped(scene, **changes):
    """Return the scene's state as after a restart: the one that the last `OpenRound` made durable."""
    opened, metadata = scene.opened, scene.state.resume_metadata
    fields = {"roster": scene.roster, "roster_bytes": scene.roster_bytes, **changes}
    engine = engine_of(scene.engine.run)
    active = scene.roster.active()
    state, actions = engine.resume(active, opened.before, scene.state.round, opened.available, metadata, **fields)
    again = Scene(begin=False)
    again.engine, again.state, again.actions = engine, state, actions
    again.roster, again.roster_bytes = scene.roster, scene.roster_bytes
    again.seen = list(actions)
    again.folded = getattr(scene, "folded", None)
    return again


def changed(value, **changes):
    return dataclasses.replace(value, **changes)
