"""A fleet's keys and one run on disk, without a network, for tests of a device's part in a rollover."""

import dataclasses

import numpy as np

from aggregator import membership as aggregators
from crypto.seal.envelope import open_from_member, read_head
from edge_client import membership as enrolment
from edge_client.learning.data import Dataset, split
from edge_client.learning.model import OrtModel
from edge_client.learning.update import TrainingContext
from edge_client.run import rollover
from edge_client.run.package import open_run
from edge_client.storage.update_cache import UpdateCache
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import RunOptions, make_plan, write_run
from shoal.protocol.codec import decode, decode_prefix
from shoal.protocol.epochs import Proposal
from shoal.protocol.messages import Announcement, Assignment, ModelRef, Phase, Share, Upload
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.tasks import logistic_bundle, samples

FOLDER = "dev-1"
BUNDLE = logistic_bundle()
ORIGINS = np.random.default_rng(5).standard_normal((2, BUNDLE.length)).astype(np.float32)


class Crew:
    """An owner, an aggregator and three devices that have joined; a run of two models that all devices have opened.

    Attributes:
        owner, server, members: their open directories; plan, package: the run.
        models: the models to fold, (d,) float32 by id.
    """

    def __init__(self, root, devices=("dev-1", "dev-2", "dev-3"), **options):
        self.owner = FleetDirectory.create(root / "owner", "demo", "mqtt://loopback")
        card = aggregators.init(root / "server")
        cards = {d: enrolment.init(root / d, d) for d in devices}
        grant = self.owner.add_aggregator(card.read_bytes())
        for d in devices:
            self.owner.add_device(cards[d].read_bytes())
        self.server = aggregators.join(root / "server", grant.read_bytes(), self.owner.fingerprint)
        self.members = {}
        for d in devices:
            grant = self.owner.add_device(cards[d].read_bytes())
            self.members[d] = enrolment.join(root / d, grant.read_bytes(), self.owner.fingerprint)
        self.server.adopt(self.owner.roster_bytes)
        fields = {"algorithm": "cfl", "rounds": 6, "epoch_rounds": 2, "local": FULL_BATCH, "min_contributors": 1}
        fields |= {"keys": "run", "mode": "permutation"}
        options = {**fields, **options}
        plan = make_plan(self.owner, BUNDLE, RunOptions(**options))
        self.plan = dataclasses.replace(plan, origins=2)
        self.package = write_run(self.owner, self.plan, BUNDLE, ORIGINS).read_bytes()
        self.models = {3: ORIGINS[0], 7: ORIGINS[1]}

    def shop(self, device, run=None):
        """Return a device's training context."""
        member = self.members[device]
        run = run or open_run(self.package, member)
        shares = split(Dataset(*samples(12)), b"seed")
        own = UpdateCache(member.directory, run.plan)
        return TrainingContext(
            run=run,
            identity=member.identity,
            aggregator=self.server.identity.member,
            backend=OrtModel(BUNDLE),
            shares=shares,
            own=own,
        )

    def rotate(self, *devices):
        """Let the owner draw new secrets and ``devices``, by default all, take them."""
        self.owner.rotate()
        self.hand_out(*(devices or self.members))

    def hand_out(self, *devices):
        for d in devices:
            self.members[d].take_grant((self.owner.path / "grants" / f"{d}.grant").read_bytes())

    def announced(self, plan, phase, round_=2, **changes):
        """Return (announcement, order) of a step of the rollover after ``round_``."""
        assignment = Assignment(int(phase), tuple(sorted(self.models)), int(Share.TRAIN), False, False, False)
        refs = tuple(
            ModelRef(model=m, origin=i, label="x", transfer=bytes(16), contributors=0, norm=0.0)
            for i, m in enumerate(sorted(self.models))
        )
        step = 1 if phase == Phase.CHECKPOINT else 2
        fields = {
            "fleet": plan.fleet,
            "run": plan.run,
            "run_id": plan.run_id,
            "epoch": plan.epoch,
            "key_id": plan.key_id,
            "roster_sequence": self.owner.roster.sequence,
            "round": round_,
            "nonce": bytes([step]) * 16,
            "deadline_s": 60.0,
            "finished": False,
            "models": refs,
            "assignments": (assignment,),
            "assignment_of": (0,),
            "mode": plan.mode,
            "step": step,
            **changes,
        }
        return Announcement(**fields), assignment

    def read(self, finished, device):
        """Return (Upload, attached bytes) of a device's upload, opened with the aggregator's keys."""
        data = finished.parcel.payload
        head, at = read_head(data)
        key = self.members[device].identity.member.sign_key
        signed, body = open_from_member(self.server.identity, data, head, at, key)
        upload = decode(signed, Upload)
        assert (upload.length, upload.attached) == (0, len(body))
        return upload, body

    def fold(self, carried=None, generation=0, round_=2, models=None):
        """Return (Proposal, the bytes after its head) as ``FOLDER`` makes them."""
        shop, member = self.shop(FOLDER), self.members[FOLDER]
        announcement, assignment = self.announced(shop.plan, Phase.CHECKPOINT, round_, generation=generation)
        finished = rollover.fold(shop, announcement, assignment, models or self.models, carried or {}, member)
        upload, body = self.read(finished, FOLDER)
        assert (upload.epoch, upload.key_id) == (shop.plan.epoch, shop.plan.key_id)
        assert (upload.round, upload.phase) == (round_, Phase.CHECKPOINT)
        return decode_prefix(body, Proposal)


def sealed_of(proposal, rest):
    """Return the sealed origins of a fold."""
    return bytes(rest[len(rest) - proposal.sealed :])
