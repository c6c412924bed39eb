"""Every channel of a fleet with a message that its rightful sender could leave there, and a round that waits for one upload."""

import dataclasses
import time

import numpy as np
from shoal_lab.loopback.transport import LoopbackTransport

from aggregator.storage.signed_runs import read_orders
from crypto.mask.derivation import key_id
from crypto.seal.envelope import SealedMessage, open_from_group, read_head, seal_to_group, seal_to_member
from crypto.seal.identity import peek_document, sign_document
from edge_client.models.checkpoints import seal_checkpoint
from edge_client.protocol.roster_sync import RosterSync
from shoal.membership.grants import seal_grant
from shoal.membership.roster_changes import owner_purpose, roster_change
from shoal.owner.enrolment.admission import Registrar
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.messages import Decline, DeclineReason, Notice, Presence, Reminder, RunOrder, Sealed
from shoal.protocol.recipe import Recipe
from shoal.protocol.requests import RequestAction
from shoal.protocol.states import MeanHeader, StateId, checkpoint_number, mean_number
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message
from tests.helpers.fleets import (
    FULL_BATCH,
    Wiretap,
    aggregator_identity,
    announcements,
    answers,
    device_identity,
    group_key,
    make_exact_fleet,
    open_upload,
    seal_upload,
    tell,
    whole,
)
from tests.helpers.owner_requests import request_of, seal_request
from tests.scenarios.round_fleets import round_keys

VICTIM = "dev-02"
ATTACKER = "attacker"
TOPICS = Topics("demo")


class Scene:
    """Round 2 of three waits for the victim's upload, which is known and withheld; the roster was renewed before."""

    def __init__(self, root):
        self.tap = Wiretap()
        self.fleet = make_exact_fleet(root, faults=self.tap, quorum=1.0)
        self.owner = self.fleet.stage.fleet
        transport = LoopbackTransport(self.fleet.broker, "owner", lambda _event: None)
        registrar = Registrar(self.owner, transport)
        registrar.start(int(time.time()))
        transport.start()
        for _ in range(2):
            self.owner.renew()
            registrar.publish_roster()
            registrar.publish_keys()
            self.fleet.broker.pump()
        self.fleet.run_until(lambda: self.fleet.closed() == 1, 10)
        self.runtime._notes.decline(announcements(self.fleet, self.tap)[0], DeclineReason.DATA)
        counted = answers(self.fleet, self.tap, VICTIM)[-1].transfer
        self.runtime._notes.remind(self.fleet.plan.run_id, 1, SealedMessage(bytes(1), counted, bytes(32)), 1024, 0)
        self.want_whole_rosters()
        self.rule = self.tap.lose(client=self.fleet.client_id(VICTIM), ending="/up")
        self.fleet.settle()
        assert self.service.state.round == 2
        self.fleet.ask(RequestAction.LIST)
        self.aggregator, self.device = aggregator_identity(self.fleet), device_identity(self.fleet, VICTIM)
        self.group = group_key(self.fleet)
        self.announced = announcements(self.fleet, self.tap)[-1]
        self.answered = answers(self.fleet, self.tap, VICTIM)[-1]
        keys, plan = round_keys(self.fleet, 2), self.fleet.plan
        self.clear = key_id(keys.mask, keys.context(plan.task_digest, "none", plan.mask_segments))
        self.offer_checkpoint()
        options = Recipe("fedavg", rounds=2, min_contributors=1, seed=0, local=FULL_BATCH)
        self.fleet.stage.add_run(self.fleet.bundle, np.zeros((1, plan.length), np.float32), options)
        self.later = decode((self.owner.path / "runs" / "000002.run").read_bytes(), RunPackage)

    def offer_checkpoint(self):
        """Publish a checkpoint, to which the victim subscribes as if it lacked the model."""
        state = self.fleet.devices["dev-00"].runtime._models.states.held[StateId(0, 1)]
        labels = (*self.runtime.session.labels, self.label(checkpoint_number(0)))
        self.runtime._go_on(self.runtime.session._followed(labels))
        sealed = seal_checkpoint(device_identity(self.fleet, "dev-00"), round_keys(self.fleet, 2), state).payload
        topic = TOPICS.model(self.label(checkpoint_number(0)))
        tell(self.fleet, topic, "checkpoint", sealed, ChunkKind.CHECKPOINT, round_=2)
        self.fleet.settle()

    def label(self, number):
        """Return the topic label of a mean or checkpoint."""
        return group_key(self.fleet).topic_label(self.fleet.plan.run_id, number)

    def want_whole_rosters(self):
        """Have the victim ask for whole rosters, as if it had missed a change, for as long as the scene lasts."""
        runtime = self.runtime
        wanting = RosterSync(wanted=1 << 31, devices=len(self.owner.roster.devices))
        roster, asking = wanting._ask(runtime._facts())
        runtime._go_on((dataclasses.replace(runtime.session, roster=roster), asking))

    @property
    def service(self):
        return self.fleet.service

    @property
    def runtime(self):
        return self.fleet.devices[VICTIM].runtime

    def grant(self, **changes):
        """Return the victim's GrantFile with other contents."""
        (card,) = (c for c in self.owner.cards() if c.member.name == VICTIM)
        if not changes:
            return self.owner.grant_for(card)
        signer = changes.pop("signer", self.owner.owner)
        member = self.runtime._membership
        return seal_grant(signer, card, dataclasses.replace(member.grant, receiving=member.receiving.first, **changes))

    def true(self, channel):
        """Return every payload that its rightful sender left on a channel, oldest first."""
        topic = CHANNELS[channel].topic(self)
        sent = [p for p in self.tap.sent() if p.topic == topic and p.payload and p.client != ATTACKER]
        return whole([p.payload for p in sent if parse(p.payload)[0].kind is CHANNELS[channel].kind])

    def publish(self, channel, payload):
        """Publish a payload on the channel's topic, as any client of the broker could."""
        kind = CHANNELS[channel].kind
        self.deliver(channel, split(payload, kind=kind, round=2))

    def deliver(self, channel, chunks):
        for chunk in chunks:
            self.fleet.broker.submit(ATTACKER, Message(CHANNELS[channel].topic(self), chunk), lambda: None)
        self.fleet.settle()

    def standing(self):
        """Return all by which either side would show that it has believed something."""
        service, runtime = self.service, self.runtime
        server, member = service._membership, runtime._membership
        return (
            (service.state.round, dict(service.state.received), service.state.devices, service.state.online),
            dict(service.state.declined),
            (server.roster_bytes, server.grant, server.next),
            (service.state.order, read_orders(server.directory)),
            (
                runtime.session.round.mark,
                runtime.session.round.plan,
                runtime._following._known,
                runtime.session.round.stage,
            ),
            (member.roster_bytes, member.grant, member.next),
            runtime.session.notice,
        )


@dataclasses.dataclass(frozen=True)
class Channel:
    """A kind of message with its topic and seal.

    Attributes:
        topic: of the scene; kind: of its chunks.
        seal: (scene, signer or None, fleet, downgraded) -> a payload whose sender holds every key that is shared.
    """

    topic: object
    kind: ChunkKind
    seal: object


def upload(scene, signer, fleet, downgraded):
    header, body = open_upload(scene.fleet, VICTIM, scene.true("upload")[-1])
    changes = {"mode": "none", "key_id": scene.clear} if downgraded else {}
    header = dataclasses.replace(header, fleet=fleet, **changes)
    return seal_upload(
        scene.fleet, VICTIM, header, body, signer=signer, head=Sealed(fleet, "upload", VICTIM, "aggregator")
    )


def decline(scene, signer, fleet, _):
    """The victim can't take part in the round that waits for it."""
    said = Decline(fleet, VICTIM, scene.fleet.plan.run_id, scene.announced.nonce, int(DeclineReason.DATA))
    head = Sealed(fleet, "decline", VICTIM, "aggregator")
    return seal_to_member(signer or scene.device, scene.aggregator.member.seal_key, head, encode(said))


def reminder(scene, signer, fleet, _):
    """Return the victim's reminder of its upload."""
    state = scene.runtime.session.round
    said = Reminder(
        fleet=fleet,
        device=VICTIM,
        run_id=scene.fleet.plan.run_id,
        round=2,
        transfer=state.transfer,
        digest=bytes(32),
        size=1,
        chunk_bytes=1024,
        turn=1 << 63,
    )
    head = Sealed(fleet, "reminder", VICTIM, "aggregator")
    return seal_to_member(signer or scene.device, scene.aggregator.member.seal_key, head, encode(said))


def gone(scene, signer, fleet, _):
    """A presence that says the victim has left."""
    service = scene.service
    birth = service._presences._births[service._membership.roster.device(VICTIM).sign_key] + 1
    head = Sealed(fleet, "presence", VICTIM, "*")
    return seal_to_group(
        signer or scene.device, scene.group, head, encode(Presence(fleet, VICTIM, birth, online=False))
    )


def letter(scene, signer, fleet, _):
    """A newer roster, without the victim, to the aggregator."""
    roster = newer(scene, fleet)
    document = sign_document(signer or scene.owner.owner, roster)
    head = Sealed(fleet, owner_purpose(roster.sequence, document), "owner", "aggregator")
    return seal_to_member(signer or scene.owner.owner, scene.aggregator.member.seal_key, head, document)


def request(scene, signer, fleet, _):
    """The owner's request to pause the run."""
    wanted = request_of(RequestAction.PAUSE, run=1, sequence=1 << 20, fleet=fleet)
    return seal_request(scene.owner, scene.aggregator.member, wanted, signer=signer).payload


def newer(scene, fleet):
    roster = scene.owner.roster
    return dataclasses.replace(roster, fleet=fleet, sequence=roster.sequence + 1, revoked=(VICTIM,))


def told(scene, signer, fleet, purpose, plain):
    return seal_to_group(signer or scene.aggregator, scene.group, Sealed(fleet, purpose, "aggregator", "*"), plain)


def announcement(scene, signer, fleet, _):
    after = dataclasses.replace(scene.announced, fleet=fleet, round=3, nonce=b"\7" * 16)
    return told(scene, signer, fleet, "announcement", encode(after))


def mean(scene, signer, fleet, downgraded):
    """Another mean under the label of round 1, which round 3 uses again: kept until it is announced."""
    plain = bytes(opened(scene, scene.true("mean")[-1]))
    header, body = decode_prefix(plain, MeanHeader)
    changes = {"key_id": scene.clear} if downgraded else {}
    header = dataclasses.replace(header, fleet=fleet, **changes)
    return told(scene, signer, fleet, "mean", encode(header) + bytes(body))


def checkpoint(scene, signer, fleet, _):
    return told(scene, signer, fleet, "checkpoint", bytes(opened(scene, scene.true("checkpoint")[-1])))


def opened(scene, sealed):
    head, at = read_head(sealed)
    return open_from_group(scene.group, sealed, head, at, scene.aggregator.member.sign_key)


def run(scene, signer, fleet, downgraded):
    """A later run of the same task; under another mode, its plan is the aggregator's own."""
    changes = {"mode": "none"} if downgraded else {}
    plan = peek_document(scene.later.plan, RunPlan)
    plan = dataclasses.replace(plan, fleet=fleet, recipe=dataclasses.replace(plan.recipe, **changes))
    document = sign_document(scene.aggregator if downgraded else scene.owner.owner, plan)
    return told(scene, signer, fleet, "run", encode(dataclasses.replace(scene.later, plan=document)))


def roster(scene, signer, fleet, _):
    """A newer roster without the victim, signed by the aggregator or a stranger, or by the owner for another fleet."""
    author = scene.owner.owner if fleet != "demo" else signer or scene.aggregator
    return told(scene, None, fleet, "roster", sign_document(author, newer(scene, fleet)))


def change(scene, signer, fleet, _):
    """The same roster as a change of the one before, handed on by the true aggregator."""
    after = newer(scene, fleet)
    document = sign_document(scene.owner.owner if fleet != "demo" else signer or scene.aggregator, after)
    return told(scene, None, fleet, "roster change", encode(roster_change(scene.owner.roster, after, document)))


def control(scene, signer, fleet, _):
    """An answer by which the victim would take its upload for counted."""
    transfer = scene.runtime.session.round.transfer
    last = dataclasses.replace(scene.answered, fleet=fleet, round=2, transfer=transfer)
    head = Sealed(fleet, "control", "aggregator", VICTIM)
    return seal_to_group(signer or scene.aggregator, scene.group, head, encode(last))


def notice(scene, signer, fleet, _):
    """The run is paused, as the aggregator says."""
    now = Notice(
        fleet=fleet,
        sequence=1 << 40,
        sent_at_s=0,
        run=1,
        run_id=scene.fleet.plan.run_id,
        order=RunOrder.PAUSED,
        choice=b"",
    )
    return told(scene, signer, fleet, "notice", encode(now))


def keys(scene, signer, fleet, _):
    """A grant with other secrets, drawn later."""
    changes = {"fleet": fleet, "version_secret": bytes(32), "keys_since": scene.owner.roster.sequence + 1}
    if signer is not None:
        changes |= {"signer": signer, "owner_key": signer.member.sign_key}
    return scene.grant(**changes)


CHANNELS = {
    "upload": Channel(lambda _: TOPICS.up(VICTIM), ChunkKind.UPLOAD, upload),
    "decline": Channel(lambda _: TOPICS.up(VICTIM), ChunkKind.DECLINE, decline),
    "reminder": Channel(lambda _: TOPICS.up(VICTIM), ChunkKind.REMINDER, reminder),
    "presence": Channel(lambda _: TOPICS.state(VICTIM), ChunkKind.STATE, gone),
    "letter": Channel(lambda _: TOPICS.at(TopicKind.OWNER_ROSTER), ChunkKind.ROSTER, letter),
    "request": Channel(lambda _: TOPICS.owner_request, ChunkKind.REQUEST, request),
    "announcement": Channel(lambda _: TOPICS.round, ChunkKind.ROUND, announcement),
    "mean": Channel(lambda s: TOPICS.model(s.label(mean_number(0, 1))), ChunkKind.MEAN, mean),
    "checkpoint": Channel(lambda s: TOPICS.model(s.label(checkpoint_number(0))), ChunkKind.CHECKPOINT, checkpoint),
    "notice": Channel(lambda _: TOPICS.notice, ChunkKind.NOTICE, notice),
    "run": Channel(lambda _: TOPICS.plan, ChunkKind.PLAN, run),
    "roster": Channel(lambda _: TOPICS.roster, ChunkKind.ROSTER, roster),
    "change": Channel(lambda _: TOPICS.roster_change, ChunkKind.ROSTER, change),
    "control": Channel(lambda _: TOPICS.ctl(VICTIM), ChunkKind.CONTROL, control),
    "keys": Channel(lambda _: TOPICS.keys(VICTIM), ChunkKind.GRANT, keys),
}
