"""An aggregator in the wrong hands at the end of a mask epoch: it has its own key, the fleet's broadcast key and the broker."""

import dataclasses

from shoal.membership.certificates import sign_checkpoint
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode_prefix, encode
from shoal.protocol.epochs import Certificate, Endorsement, Epoch, Proposal, SignedBy
from shoal.protocol.messages import NO_ASSIGNMENT, PROPOSAL_MODEL, Assignment, ModelRef, Phase, Share
from shoal.protocol.topics import Topics
from tests.helpers.fleets import (
    Wiretap,
    announce,
    announcements,
    device_identity,
    group_key,
    open_upload,
    tell,
    uploads_of,
)

FOLD = Assignment(int(Phase.CHECKPOINT), (0,), int(Share.TRAIN), train=False, evaluate=False, margins=False)
SIGN = dataclasses.replace(FOLD, phase=int(Phase.ENDORSE))
TRAIN = dataclasses.replace(FOLD, phase=int(Phase.TRAIN), train=True)
ORIGIN = ModelRef(model=0, origin=0, label="x", transfer=bytes(16), contributors=0, norm=0.0)


def stop_at(fleet, reached):
    """Let a fleet go on in the smallest steps there are, up to the first moment at which ``reached()`` holds."""

    def act():
        yield fleet.broker.pump()
        for device in tuple(fleet.devices.values()):
            yield device.worker.work()
        yield fleet.broker.pump()
        yield fleet.service.flush(fleet.now_s)

    for _ in range(10_000):
        moved = False
        for did in act():
            moved = bool(did) or moved
            if reached():
                return
        if not moved:
            fleet.step()
    raise AssertionError(f"never there: {fleet.service.status()}")


def open_round(fleet, round_):
    """Run a fleet until ``round_`` is open but not yet announced."""
    stop_at(fleet, lambda: fleet.service.state.round == round_ and not fleet.service.state.step)


def open_step(fleet, phase):
    """Run a fleet until a step of its next rollover is open but not yet announced."""

    def there():
        plan = fleet.service.state.plan
        return plan is not None and any(o.phase == phase for o in plan.assignments.values())

    stop_at(fleet, there)


class Takeover:
    """A fleet of one model whose aggregator is an attacker; devices have sent their uploads of the last round.

    Attributes:
        fleet, tap: as in `tests.helpers.fleets`; last: the newest announcement, which everything here follows.
    """

    def __init__(self, fleet, tap: Wiretap):
        self.fleet, self.tap = fleet, tap
        fleet.kill_aggregator()
        fleet.settle()
        self.last = announcements(fleet, tap)[-1]
        self.sent_before = {d: len(uploads_of(fleet, tap, d)) for d in fleet.devices}

    def sent(self):
        """Return how many uploads each living device has sent since the last look."""
        self.fleet.settle()
        now = {d: len(uploads_of(self.fleet, self.tap, d)) for d in self.fleet.devices}
        new = [now[d] - self.sent_before[d] for d in sorted(now)]
        self.sent_before = now
        return new

    def epochs(self):
        """Return the mask epoch that each living device is in, by the order of their names."""
        self.fleet.settle()
        return [self.fleet.devices[d].runtime._run.plan.epoch for d in sorted(self.fleet.devices)]

    def assignment_of(self, *devices):
        everybody = [d.name for d in self.fleet.stage.fleet.roster.devices]
        return tuple(0 if d in devices else NO_ASSIGNMENT for d in everybody)

    def step(self, number=1, assignment=FOLD, devices=("dev-00",), **changes):
        """Return the announcement of a step after the last round."""
        fields = {
            "step": number,
            "nonce": bytes([number]) * 16,
            "finished": False,
            "models": (ORIGIN,),
            "assignments": (assignment,),
            "assignment_of": self.assignment_of(*devices),
            "roster_sequence": self.fleet.stage.fleet.roster.sequence,
            **changes,
        }
        return dataclasses.replace(self.last, **fields)

    def announce(self, announcement):
        announce(self.fleet, announcement)
        self.fleet.settle()

    def folded(self, number=1, **changes):
        """Let dev-00 fold; return (Proposal, sealed origins)."""
        self.announce(self.step(number, **changes))
        _, body = open_upload(self.fleet, "dev-00", uploads_of(self.fleet, self.tap, "dev-00")[-1])
        proposal, rest = decode_prefix(memoryview(body), Proposal)
        return proposal, bytes(rest[len(rest) - proposal.sealed :])

    def endorsements(self, checkpoint, sealed, number=2, devices=None, assignment=SIGN, **changes):
        """Have the fleet compare; return device -> signature of those that answered."""
        devices = devices or sorted(self.fleet.devices)
        label = group_key(self.fleet).topic_label(self.fleet.plan.run_id, PROPOSAL_MODEL)
        topic = Topics(self.fleet.plan.fleet).model(label)
        transfer = tell(self.fleet, topic, "proposal", encode(checkpoint) + sealed, ChunkKind.EPOCH)
        ref = ModelRef(model=PROPOSAL_MODEL, origin=0, label=label, transfer=transfer, contributors=0, norm=0.0)
        self.sent()
        self.announce(self.step(number, assignment, devices, proposal=ref, **changes))
        found = {}
        for device, new in zip(sorted(self.fleet.devices), self.sent(), strict=True):
            if new:
                _, body = open_upload(self.fleet, device, uploads_of(self.fleet, self.tap, device)[-1])
                found[device] = decode_prefix(memoryview(body), Endorsement)[0].signature
        return found

    def certificate(self, checkpoint, signatures, roster=None):
        """Return a certificate of any signatures, (device, 64 bytes) pairs or a dict."""
        pairs = signatures.items() if isinstance(signatures, dict) else signatures
        roster = self.fleet.stage.fleet.roster_bytes if roster is None else roster
        return Certificate(checkpoint, roster, tuple(SignedBy(d, s) for d, s in pairs))

    def signature(self, device, checkpoint):
        """Return the signature of a colluding device."""
        return sign_checkpoint(device_identity(self.fleet, device), checkpoint)

    def publish(self, certificate, sealed):
        """Hand a certificate out as the fleet's next mask epoch."""
        tell(
            self.fleet,
            Topics(self.fleet.plan.fleet).checkpoint,
            "epoch",
            encode(Epoch(certificate, sealed)),
            ChunkKind.EPOCH,
        )
        self.fleet.settle()
