"""A fleet under round keys: the real run service on a line that records, and devices that follow its announcements.

The devices use the library `edge_client.models` and the key schedule, with version secrets that the test chooses. Each trains
towards a target of its own, so every model is known from the means.
"""

import hashlib

import numpy as np

from aggregator.membership import AggregatorMembership
from aggregator.run_service import RunService
from aggregator.storage.store import read_records
from aggregator.workers import RunWorkers
from crypto.mask.derivation import derive, segment_keys
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import VersionKey
from crypto.seal.envelope import open_from_group, read_head, seal_to_member
from edge_client.learning.scoring import nearest_model
from edge_client.models.checkpoints import open_checkpoint, seal_checkpoint
from edge_client.models.recipes import catch_up
from edge_client.models.states import ModelStates
from edge_client.protocol.presence import presence
from shoal.errors import ShoalError
from shoal.membership.statements import check_claims, read_claims, sign_statement
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.messages import SHARED_MODEL, Announcement, Decline, DeclineReason, Upload
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.states import HeldState, MeanHeader, SealedCheckpoints, StateCertificate
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from shoal.types import MaskedVector
from tests.helpers.parties import TOPICS, Line, Parties, owners_roster
from tests.helpers.plans import D, run_plan
from tests.helpers.uploads import SlowDisk

PACKAGE = encode(RunPackage(b"plan", b"task", b"origins"))
DEADLINE_S = 30.0
NO_KEY = bytes(16)


class Retaining(Line):
    """A line that stores the aggregator's retained messages, as a broker does."""

    chunk_bytes = 1 << 19

    def __init__(self):
        super().__init__()
        self.retained = {}

    def publish(self, topic, payload, *, retain=False, **qos):
        super().publish(topic, payload, retain=retain, **qos)
        if retain:
            self.retained[topic] = bytes(payload)
            if not payload:
                del self.retained[topic]

    def whole(self, topic):
        """Return the sealed message at a topic, None if absent."""
        if topic not in self.retained:
            return None
        return bytes(Reassembler().add("x", self.retained[topic], 0.0).payload)


class RoundFleet:
    """The fleet "reef" with a run under round keys.

    Attributes:
        devices: by name; devices that are away are not `here`.
        versions: key version -> its secret.
        version_of: round -> the key version that it was announced under.
        follows: models that every device follows, besides those of its last assignment.
    """

    def __init__(self, root, count=3, origins=1, follows=(), **plan):
        self.follows = frozenset(follows)
        self.parties = Parties(root, *(f"dev-{i}" for i in range(1, count + 1)))
        roster = self.parties.owner.roster
        self.versions = {roster.keys_since: b"v" * 32}
        self.version_of = {}
        fields = {"rounds": 6, "quorum": 0.5, "min_contributors": 2, "deadline_s": DEADLINE_S, "mode": "rotation"}
        fields |= {"key_version": roster.keys_since, "origins": origins}
        self.plan = run_plan(fleet="reef", roster_sequence=roster.sequence, **{**fields, **plan})
        self.origins = np.random.default_rng(7).standard_normal((origins, D)).astype(np.float32)
        self.line, self.disk, self.now_s = Retaining(), SlowDisk(), 0.0
        self.devices = {name: RoundDevice(self, name, roster.keys_since) for name in self.parties.members}
        for device in self.devices.values():
            device.begin()
        self.here = set(self.devices)
        self.births = 0
        self.service = self.make()
        self.service.start(0.0)

    def span_of(self, model):
        """Return the coordinates that a state of the model has."""
        if len(self.plan.segments) == 1:
            return slice(None)
        return self.plan.span("shared" if model == SHARED_MODEL else "cluster")

    def make(self):
        """Return a service on the fleet's directory."""
        server = self.parties.server
        return RunService(server, self.plan, PACKAGE, self.line, server.directory, workers=RunWorkers(self.disk))

    def kill(self):
        """Start the aggregator again from its files."""
        self.service.close()
        self.parties.server = AggregatorMembership(self.parties.server.directory)
        self.disk = SlowDisk()
        self.service = self.make()
        self.service.start(self.now_s)
        self.come(*self.here)

    def come(self, *names, online=True):
        """Let devices come online, or go offline."""
        (self.here.update if online else self.here.difference_update)(names)
        for name in names:
            self.births += 1
            self.parties.members[name].group = self.parties.server.group  # as after the grant with the run's keys
            topic, chunk = presence(self.parties.members[name], self.births, online=online)
            self.service.on_event(Message(topic, chunk), self.now_s)

    def leave(self, *names):
        self.come(*names, online=False)

    @property
    def announcement(self):
        """The retained announcement; None before the first round."""
        sealed = self.line.whole(TOPICS.round)
        if sealed is None:
            return None
        found = decode(self.opened(sealed), Announcement)
        self.version_of.setdefault(found.round, found.held.key_version)
        return found

    def opened(self, sealed):
        """Return the plaintext of a message of the aggregator."""
        server = self.parties.server
        head, at = read_head(sealed)
        return bytes(open_from_group(server.group, sealed, head, at, server.identity.member.sign_key))

    def at(self, label):
        """Return the plaintext at the label of a mean or a checkpoint, None if absent."""
        sealed = self.line.whole(TOPICS.model(label))
        return None if sealed is None else self.opened(sealed)

    def send(self, name, channel, message, body=b"", round_=0):
        """Publish a device's message to the aggregator."""
        server = self.parties.server.identity.member
        head = channel.head("reef", name, "aggregator")
        sealed = seal_to_member(self.parties.members[name].identity, server.seal_key, head, encode(message), body)
        for chunk in split(sealed, kind=channel.kind, round=round_):
            self.service.on_event(Message(TOPICS.up(name), chunk), self.now_s)

    def answer(self, *names):
        """Let devices follow the announcement and do their part, and commit."""
        announcement = self.announcement
        for name in names or sorted(self.here):
            if name in self.here:
                self.devices[name].answer(announcement)
        self.commit()

    def commit(self):
        self.service.flush(self.now_s)
        self.disk.done()

    def round(self):
        """Do one round with the devices that are here; after the deadline if one does not answer."""
        before = self.service.state.round
        self.answer()
        if self.service.state.round == before and not self.service.finished:
            self.now_s += DEADLINE_S
            self.service.tick(self.now_s)

    def finish(self, after=lambda: None):
        """Do all rounds that are left."""
        for _ in range(4 * self.plan.recipe.rounds):
            if self.service.finished:
                return
            self.round()
            after()
        raise AssertionError(self.service.status())

    def records(self):
        return read_records(self.parties.server.directory / "run-000001")

    def rotate(self, revoked=None, *, deliver=True):
        """Let the owner draw a new key version, for aggregator and devices that are here; return its number."""
        owner = self.parties.owner
        if revoked is None:
            owner.rotate()
        else:
            owner.revoke(revoked)
        version = owner.roster.keys_since
        self.versions[version] = hashlib.sha256(b"%d" % version).digest()
        for name in self.here:
            self.devices[name].renew(version)
        if deliver:
            self.deliver()
        self.service.on_event(Message(TOPICS.at(TopicKind.OWNER_ROSTER), owners_roster(self.parties)), self.now_s)
        return version

    def deliver(self):
        """Give the aggregator the newest secrets."""
        self.parties.server.take_grant(self.parties.grant())
        self.service._hold_keys()


class RoundDevice:
    """A device under round keys.

    Attributes:
        states: those that it holds; chains: by key version; follows: the models of its last assignment.
        declined: rounds that it declined for lack of a state.
    """

    def __init__(self, fleet, name, version):
        self.fleet, self.name = fleet, name
        self.identity = fleet.parties.members[name].identity
        self.chains, self.keys, self.declined, self.uploaded = {}, {}, [], []
        self.renew(version)
        self.states = ModelStates("reef", fleet.plan.run_id, {})
        self.follows = set(range(fleet.plan.origins))
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self.target = np.random.default_rng(seed).standard_normal(D).astype(np.float32)

    def renew(self, version):
        secret = self.fleet.versions[version]
        self.chains[version] = VersionKey("reef", version, secret).begin_run(self.fleet.plan.run_id, 0)

    def begin(self):
        """Take the origins from the run package."""
        (chain,) = self.chains.values()
        self.states = ModelStates.of_origins(dict(enumerate(self.fleet.origins.copy())), chain.take())

    def has_keys(self, round_):
        chain = self.chains.get(self.fleet.version_of.get(round_))
        return round_ in self.keys or (chain is not None and chain.next_round <= round_)

    def keys_of(self, round_):
        if round_ not in self.keys:
            chain = self.chains[self.fleet.version_of[round_]]
            chain.skip_to(round_)
            self.keys[round_] = chain.take()
        return self.keys[round_]

    def mask_of(self, round_):
        keys, plan = self.keys_of(round_), self.fleet.plan
        return derive(keys.mask, keys.context_of(plan))

    def certified(self, held):
        """Return state -> digest for the states that enough statements of the announcement name."""
        claims = tuple(read_claims(held.statements))
        found = {}
        named = [n for claim in claims for n in claim.statement.states]
        for state in {n.state for n in named}:
            for digest in {n.digest for n in named if n.state == state}:
                try:
                    check_claims(
                        claims,
                        HeldState(state.model, state.round, digest),
                        fleet="reef",
                        run_id=self.fleet.plan.run_id,
                        roster=self.fleet.parties.owner.roster,
                        needed=self.fleet.plan.recipe.min_contributors,
                    )
                except ShoalError:
                    continue
                found[state] = digest
        return found

    def follow(self, announcement, order=None):
        """Bring the states up to date; return whether all that the assignment names are held."""
        held = announcement.held
        if order is not None:
            self.follows = {held.state_of(model).model for model in order.models} | {SHARED_MODEL}
            self.follows |= self.fleet.follows
        follows = self.follows
        certified = self.certified(held)
        steps = [kept.step for kept in held.steps]
        wanted = {state for state in steps[-1].open if state.model in follows} if steps else set(self.states.held)
        for _ in range(len(held.checkpoints) + 2):
            way = catch_up(self.states.digests(), steps, wanted=wanted, has_keys=self.has_keys, certified=certified)
            self.states = self.states.keep(set(self.states.held) - set(way.out_of_step))
            if not way.missing:
                break
            refs = [ref for ref in held.checkpoints if ref.state in way.missing]
            refs = refs or [ref for ref in held.checkpoints if self._leads(ref.state, way.missing, steps)]
            taken = [state for state in (self.take(ref, held) for ref in refs) if state is not None]
            if not taken:
                break  # perhaps of a model that this round does not need
            self.states = self.states.with_states(taken)
        for step in way.steps:
            means = {}
            for ref in next(kept for kept in held.steps if kept.step.round == step.round).means:
                if any(recipe.model == ref.model for recipe in step.recipes):
                    means[ref.model] = self.mean(ref, step.round)
            self.states = self.states.apply(step, means, self.keys_of(step.round), span_of=self.fleet.span_of)
        self.states = self.states.keep(way.keep)
        needed = {held.state_of(model) for model in (() if order is None else order.models)}
        return needed <= set(self.states.held)

    @staticmethod
    def _leads(state, missing, steps):
        found = {state}
        for step in steps:
            found |= {r.state for r in step.recipes if all(t.state in found for t in r.terms)}
        return bool(found & set(missing))

    def take(self, ref, held):
        """Return the state in an announced checkpoint; None if this device has not the keys."""
        self.fleet.version_of.setdefault(ref.round, ref.key_version)
        if not self.has_keys(ref.round):
            return None
        state, _ = open_checkpoint(
            self.fleet.at(ref.label),
            StateCertificate(held.statements),
            wanted=ref.state,
            keys=self.keys_of(ref.round),
            roster=self.fleet.parties.owner.roster,
            length=D if ref.state.round == 0 else len(range(D)[self.fleet.span_of(ref.state.model)]),
            signers=self.fleet.plan.recipe.min_contributors,
        )
        return state

    def mean(self, ref, round_):
        header, body = decode_prefix(self.fleet.at(ref.label), MeanHeader)
        key = self.mask_of(round_)
        assert (header.round, header.model, header.key_id) == (round_, ref.model, key.key_id)
        assert header.segment == ("" if header.length == D else "shared" if ref.model == SHARED_MODEL else "cluster")
        key = segment_keys(key)[header.segment] if header.segment else key
        return unmask(MaskedVector(np.frombuffer(body, "<f4").copy(), key.key_id), key)

    def theta(self, held, model):
        """Return the model at which the round offers it, (d,)."""
        parts = [m for m in (model, SHARED_MODEL) if held.state_of(m) is not None]
        whole = np.empty(D, np.float32)
        for part in parts:
            span, state = self.fleet.span_of(part), self.states.held[held.state_of(part)]
            whole[span] = state.theta[span] if state.id.round == 0 else state.theta
        return whole

    def answer(self, announcement):
        """Follow the announcement, and upload or decline if it asks this device."""
        roster = self.fleet.parties.owner.roster
        index = next(i for i, member in enumerate(roster.devices) if member.name == self.name)
        order = announcement.order_for(index)
        able = self.follow(announcement, order)
        r = announcement.round
        if order is None or r in self.uploaded:
            return
        if not able:
            self.declined.append(r)
            decline = Decline("reef", self.name, announcement.run_id, announcement.nonce, DeclineReason.STATE)
            self.fleet.send(self.name, channels.DECLINE, decline, round_=r)
            return
        self.uploaded.append(r)
        self.fleet.send(self.name, channels.UPLOAD, *self.upload(announcement, order), round_=r)

    def damage(self):
        """Flip a bit of each state held."""
        for state in self.states.held.values():
            theta = state.theta.copy()
            theta.view(np.uint32)[0] ^= 1
            made = type(state).of(state.id, theta, run_id=self.fleet.plan.run_id, digest_key=state.digest_key)
            self.states = self.states.with_states([made])

    def upload(self, announcement, order):
        """Return header and body of the upload that an assignment asks for."""
        plan, held, r = self.fleet.plan, announcement.held, announcement.round
        model = self.choose(held, order)
        keys, key = self.keys_of(r), self.mask_of(r)
        first = self.loss(held, order.candidates[0])
        theta = self.theta(held, model)
        body, nearest = b"", 0
        if order.train:
            update = (np.float32(0.2) * (self.target - theta)).astype(np.float32)
            if order.compare:
                nearest = nearest_model(model, update, order.compare, {m: self.theta(held, m) for m in order.models})
            body = mask(update, key).values.astype("<f4").tobytes()
        attached = b""
        if seals := tuple(m for m in order.seal if held.state_of(m) in self.states.held):
            sealed = [seal_checkpoint(self.identity, keys, self.states.held[held.state_of(m)]).payload for m in seals]
            head = SealedCheckpoints(seals, tuple(len(envelope) for envelope in sealed))
            attached = encode(head) + b"".join(sealed)
        statement = self.states.statement(self.name, r, held.transcript)
        header = Upload(
            fleet="reef",
            run=plan.run,
            run_id=plan.run_id,
            round=r,
            phase=order.phase,
            nonce=announcement.nonce,
            device=self.name,
            recipient=self.fleet.parties.server.identity.member.seal_key,
            task_digest=plan.task_digest,
            mode=plan.recipe.mode,
            key_id=key.key_id,
            model=model,
            samples=10,
            loss=self.loss(held, model),
            margins=(*(self.loss(held, m) - first for m in order.candidates), 0.0)[: order.figures],
            correct=3 if order.evaluate else 0,
            tested=4 if order.evaluate else 0,
            length=len(body) // 4,
            model_norm=float(np.linalg.norm(theta)) if order.norm else 0.0,
            attached=len(attached),
            key_version=held.key_version,
            statement=sign_statement(self.identity, statement),
            nearest=nearest,
        )
        return header, body + attached

    def choose(self, held, order):
        """Return the candidate nearest to this device's target."""
        return min(order.candidates, key=lambda model: self.loss(held, model))

    def loss(self, held, model):
        return float(np.linalg.norm(self.theta(held, model) - self.target))
