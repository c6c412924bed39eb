"""Parsers of network input: chunks, topics and envelopes, and each party's handling of the messages in them."""

from __future__ import annotations

import dataclasses

import numpy as np
from shoal_lab.loopback.transport import Hop

from aggregator.membership import AggregatorMembership
from aggregator.owner_inbox import OwnerInbox
from aggregator.owner_requests import OwnerRequests
from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.engine import Engine
from aggregator.rounds.state import CameOnline
from aggregator.run_control import RunControl
from aggregator.status.answers import RunEntry, RunPage, decoded, encoded
from aggregator.status.record import FleetStatus
from aggregator.storage.signed_runs import OwnerOrders
from aggregator.strategies.base import contribution_of
from aggregator.strategies.registry import make_strategy, models_needed
from aggregator.uploads.validation import UploadVerifier
from crypto.seal.envelope import GroupKey, open_from_group, open_from_member, read_head, seal_to_group, seal_to_member
from crypto.seal.identity import Identity
from edge_client.models.checkpoints import CONTENT_LABEL, checkpoint_head, open_checkpoint, seal_checkpoint
from edge_client.protocol import round_state as agent
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.enrol_requests import make_request, open_refusal, prove, token_group, token_id
from shoal.membership.grants import OWNER_NAME, open_card, open_grant, open_notice, open_renewal
from shoal.membership.roster import apply_change, open_roster
from shoal.membership.roster_changes import owner_purpose, roster_change
from shoal.membership.statements import check_certificate
from shoal.owner.console.asking import Question
from shoal.owner.enrolment.admission import Registrar, make_refusal, open_request
from shoal.owner.models.reader import open_presence
from shoal.protocol.channels import ENROLMENT, PRESENCE
from shoal.protocol.chunking import ChunkKind, Fingerprint, split
from shoal.protocol.chunking import parse as parse_chunk
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import DeviceGrant, Roster, RosterChange
from shoal.protocol.enrolment import EnrolRequest, EnrolStatement, Token
from shoal.protocol.messages import Announcement, Control, Presence, Sealed
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.codec import encode as encode_vector
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.recipe import Setting
from shoal.protocol.requests import RequestAction
from shoal.protocol.states import read_certificate
from shoal.protocol.topics import TopicKind, Topics
from shoal.protocol.topics import parse as parse_topic
from shoal.transport.base import Message
from tests.helpers import fleets
from tests.helpers import model_states as made
from tests.helpers.owner_requests import request_of, seal_request
from tests.helpers.parties import Line
from tests.helpers.plans import FULL_BATCH, engine_of, run_plan, upload_of
from tests.helpers.receiving import RECEIVING, device_card
from tests.properties.parsers.every import Parser, parcelled, parts_of, text
from tests.properties.parsers.scene import DEVICE, Silent

STRATEGIES = {
    "fedavg": {},
    "ifca": {"k": 2},
    "cfl": {},
    "fedgroup": {"groups": 2, "alpha": 2, "eta_g": 0.1},
    "fesem": {"k": 2},
    "one-shot": {"k": 2},
    "local": {},
}


def parsers(scene):
    """Return the parsers of network input."""
    return [*_outer(scene), *_sealed(scene), *_states(), *_owners(scene), *_devices(scene), *_aggregators(scene)]


def _outer(scene):
    topics = sorted({p.topic for p in scene.tap.heard})
    chunks = split(bytes(range(256)) * 20, kind=ChunkKind.MEAN, round=1, chunk_bytes=1024)

    def reassemble(data):
        one = Reassembler(max_transfer_bytes=1 << 16, whole_transfers=2, max_per_source=2)
        refused = None
        for at, chunk in enumerate(parts_of(data)):
            try:
                one.add(f"s{at % 2}", chunk, float(at))
            except ShoalError as error:
                refused = error
            assert one.held_bytes <= 2 * one.budget_bytes(1 << 16)
        one.expire(1e9)
        assert one.held_bytes == 0
        if refused:
            raise refused

    return [
        Parser("topic", tuple(t.encode() for t in topics), lambda d: parse_topic(text(d))),
        Parser("broker address", (b"mqtt://h", b"mqtts://user:pa%20ss@[::1]:8883/"), lambda d: _address(text(d))),
        Parser("enrolment line", (scene.token.to_line().encode(),), lambda d: Token.from_line(text(d))),
        Parser("chunk", (chunks[0], chunks[-1]), lambda d: parse_chunk(d)),
        Parser("reassembly", (parcelled(*chunks), parcelled(*chunks[::-1], *chunks)), reassemble),
        Parser(
            "settings of a strategy",
            (b"1 ifca\nk=1\nrestarts=1", b"2 ifca\nk=2", b"1 cfl\neps1=0.4\npath=on"),
            _settings,
        ),
    ]


def _address(url):
    found = BrokerAddress.parse(url)
    return str(found), found.is_loopback, repr(found)


def _settings(data):
    (origins, _, name), *lines = (line.partition(" ") for line in text(data).split("\n"))
    pairs = ["".join(line).partition("=") for line in lines]
    plan = run_plan(name, origins=2 if origins == "2" else 1)
    recipe = dataclasses.replace(plan.recipe, settings=tuple(Setting(n, v) for n, _, v in pairs))
    plan = dataclasses.replace(plan, recipe=recipe)
    make_strategy(plan)
    return models_needed(plan)


def _states():
    """Return the parsers of model states: the sender of each input may be hostile."""
    keys = made.chain().take()
    states = made.origins(made.vector(1, 2), keys=keys)
    held, signed = states.newest(0), made.certificate(states, 1, made.IDENTITIES[:2])
    head = checkpoint_head(keys, held.id, made.IDENTITIES[0].name)
    group = GroupKey(keys.fleet, CONTENT_LABEL, keys.content)
    honest = open_from_group(
        group,
        *_taken_apart(seal_checkpoint(made.IDENTITIES[0], keys, held).payload),
        made.IDENTITIES[0].member.sign_key,
    )

    def checkpoint(data):
        return open_checkpoint(
            seal_to_group(made.IDENTITIES[0], group, head, data),
            signed,
            wanted=held.id,
            keys=keys,
            roster=made.roster(),
            length=2,
            signers=2,
        )

    def certified(data):
        return check_certificate(
            read_certificate(data),
            held.held,
            fleet=keys.fleet,
            run_id=keys.run_id,
            roster=made.roster(),
            needed=2,
        )

    return [
        Parser("checkpoint of a state", (bytes(honest),), checkpoint),
        Parser("certificate of a state", (encode(signed),), certified),
        *map(_vector_in, limits.PRECISIONS),
    ]


def _vector_in(precision):
    """Return the parser of a vector in a precision; the length is the plan's."""
    seed = encode_vector(np.linspace(-1, 1, 300, dtype=np.float32), precision, b"seed")
    return Parser(f"vector in {precision}", (seed,), lambda d: decode_vector(d, 300, precision))


def _taken_apart(payload):
    head, at = read_head(payload)
    return payload, head, at


def _sealed(scene):
    (upload, *_) = fleets.uploads_of(scene.fleet, scene.tap, DEVICE)
    (announcement, *_) = scene.payloads(ending="/s/round")
    grant, held = scene.new_grant(), scene.membership.receiving

    def from_member(data):
        head, at = read_head(data)
        return open_from_member(scene.aggregator, data, head, at, scene.device.member.sign_key)

    def from_group(data):
        head, at = read_head(data)
        return open_from_group(scene.group, data, head, at, scene.aggregator.member.sign_key)

    def resealed(data):
        """A member envelope whose inside is anything: its own sender may be hostile."""
        head = Sealed("demo", "upload", DEVICE, "aggregator")
        public = scene.aggregator.member.seal_key
        sealed = bytearray(seal_to_member(scene.device, public, head, data))
        return from_member(bytes(sealed))

    owner_key = scene.owner.owner.member.sign_key
    return [
        Parser("envelope head", (upload, announcement), read_head),
        Parser("envelope to a member", (upload,), from_member),
        Parser("envelope to a member, any inside", (b"", b"x" * 40), resealed),
        Parser("envelope to the group", (announcement,), from_group),
        Parser("card", (scene.card,), open_card),
        Parser("notice of receiving keys", (scene.notice,), lambda d: open_notice(d, scene.device.member.sign_key)),
        Parser("grant", (grant,), lambda d: open_grant(scene.device, d, DeviceGrant, scene.owner.fingerprint, held)),
        Parser("renewed grant", (grant,), lambda d: open_renewal(scene.device, d, DeviceGrant, owner_key, held)),
        Parser(
            "signed roster",
            (scene.owner.roster_bytes,),
            lambda d: open_roster(d, owner_key=owner_key, fleet="demo", least_sequence=0, now_s=0),
        ),
        Parser(
            "enrolment request", (make_request(scene.newcomer, scene.token, 1000, RECEIVING.public),), _request(scene)
        ),
    ]


def _request(scene):
    return lambda data: open_request(data, scene.token)


def _owners(scene):
    """Return the owner's parsers: any bytes at a token's topic, and any card in a request with a valid proof."""
    topics = Topics("demo")
    request = make_request(scene.newcomer, scene.token, 1000, RECEIVING.public)
    name = scene.token.secret
    topic = topics.enrol(token_id(name))

    def registrar():
        made = Registrar(scene.owner, Silent())
        made.start(1000)
        return made

    def enrolment(data):
        where, _, payload = data.partition(b"|")
        registrar().on_event(Message(text(where), payload), 1000)

    def proven(data):
        """Parse any bytes as the statement of a request with a valid proof."""
        head = ENROLMENT.head("demo", scene.newcomer.name, OWNER_NAME)
        plain = prove(scene.token, data or b"x") + data
        sealed = seal_to_group(scene.newcomer, token_group(scene.token), head, plain)
        return open_request(encode(EnrolRequest(scene.newcomer.member, sealed)), scene.token)

    def presence(data):
        """Parse any bytes in the envelope of a presence that a device of the fleet has sealed."""
        device = fleets.device_identity(scene.fleet, DEVICE)
        sealed = seal_to_group(device, scene.group, PRESENCE.head("demo", DEVICE), data)
        return open_presence(sealed, DEVICE, scene.fleet.stage.fleet)

    card = device_card(scene.newcomer)
    statement = encode(
        EnrolStatement(
            fleet=scene.token.fleet,
            owner=scene.token.owner,
            aggregator=scene.token.aggregator,
            token=token_id(name),
            expires_at_s=scene.token.expires_at_s,
            asked_at_s=1000,
            card=card,
        )
    )
    (chunk,) = split(request, kind=ChunkKind.ENROL, round=0)
    member, id_ = scene.newcomer.member, token_id(scene.token.secret)
    refusal = make_refusal(scene.owner.owner, "demo", id_, member, UntrustedError("no", hint="ask"))
    return [
        Parser("owner's enrolment", (topic.encode() + b"|" + chunk,), enrolment),
        Parser("enrolment statement, proven", (statement,), proven),
        Parser("owner's refusal", (refusal,), lambda d: open_refusal(d, scene.token, scene.newcomer.member)),
        Parser("owner's presence", (encode(Presence("demo", DEVICE, 1, True, head=made.HEAD)),), presence),
    ]


def _devices(scene):
    """Return a device's parsers, for input from outsiders and from a malicious aggregator."""
    plan = scene.fleet.plan
    state, _ = agent.step(agent.RoundState(0), agent.Planned(plan))
    announcements = scene.plains(ending="/s/round")
    sending = dataclasses.replace(state, stage=agent.Stage.SENDING, transfer=b"\1" * 16)
    runtime = scene.fleet.devices[DEVICE].runtime
    heard = scene.passages(Hop.DOWN, DEVICE)

    def announced(data):
        after, _ = agent.step(state, agent.Announced(decode(data, Announcement)))
        return after

    def broadcast(data):
        return scene.membership.open_broadcast(memoryview(data), Fingerprint.of(memoryview(data)).signed)

    def whole(data):
        topic, payload, *_ = [*parts_of(data), b"", b""]
        runtime.on_event(Message(text(topic), payload), scene.fleet.now_s)

    grant = (scene.owner.path / "grants" / f"{DEVICE}.grant").read_bytes()
    return [
        Parser("announcement, by the aggregator", tuple(announcements), announced),
        Parser(
            "control, by the aggregator",
            tuple(scene.plains(ending=f"/{DEVICE}/ctl")),
            lambda d: agent.step(sending, agent.Answered(decode(d, Control))),
        ),
        Parser("broadcast", tuple(scene.payloads(ending="/s/round")), broadcast),
        Parser("keys for a device", (grant,), scene.membership.take_grant),
        Parser("roster for a device", (scene.owner.roster_bytes,), scene.membership.adopt),
        _changes(scene),
        Parser("device", tuple(parcelled(t.encode(), p) for t, p in heard), whole),
    ]


def _changes(scene):
    """A device of an older roster hears of the newest."""
    owner, newest = scene.owner, scene.owner.roster
    older = dataclasses.replace(newest, sequence=newest.sequence - 1, devices=newest.devices[:1])
    key, seed = owner.owner.member.sign_key, encode(roster_change(older, newest, owner.roster_bytes))

    def apply(data):
        signed = apply_change(older, decode(data, RosterChange))
        return open_roster(signed, owner_key=key, fleet="demo", least_sequence=0, now_s=0)

    return Parser("change of a device's roster", (seed,), apply)


def _aggregators(scene):
    """Return the aggregator's parsers, for input from outsiders and from a hostile device, and for each strategy."""
    membership = AggregatorMembership(scene.fleet.stage.aggregator_dir)
    mail = OwnerInbox(membership)
    topics = Topics("demo")
    signed = scene.owner.roster_bytes
    purpose = owner_purpose(scene.owner.roster.sequence, signed)
    head = Sealed("demo", purpose, OWNER_NAME, membership.identity.name)
    roster = seal_to_member(scene.owner.owner, membership.identity.member.seal_key, head, signed)
    (letter,) = split(roster, kind=ChunkKind.ROSTER, round=0)
    service = scene.fleet.service
    sent = [pair for d in scene.fleet.stage.devices for pair in scene.passages(Hop.UP, d)]

    orders = OwnerOrders(membership.directory)
    inbox = OwnerRequests(membership, Silent(), orders, RunControl(membership, orders, lambda: service))
    sealed = seal_request(scene.owner, membership.identity.member, request_of(RequestAction.LIST))
    (request,) = split(sealed.payload, kind=ChunkKind.REQUEST, round=0)

    question = Question(scene.owner, RequestAction.LIST)
    line = Line()
    OwnerRequests(membership, line, orders, RunControl(membership, orders, lambda: service)).take(
        topics.owner_request, split(question.sealed.payload, kind=ChunkKind.REQUEST, round=0)[0], 0.0
    )
    answer = line.sent[0][1]
    entry = RunEntry(run=1, run_id=bytes(16), algorithm="ifca", phase="round", round=1, rounds=3)
    status = FleetStatus(
        fleet="demo", running=True, connected=True, broker="mqtt://b", since_s=None, problems=(), run=None, devices=()
    )

    def answers(data):
        question.on_event(Message(topics.owner_answer, data), 0.0)
        return question.answer

    def requests(data):
        return inbox.take(topics.owner_request, data, 0.0)

    def letters(data):
        return mail.take(topics.at(TopicKind.OWNER_ROSTER), data, 0.0)

    def whole(data):
        topic, payload, *_ = [*parts_of(data), b"", b""]
        service.on_event(Message(text(topic), payload), scene.fleet.now_s)

    return [
        Parser("owner's letter to the aggregator", (letter,), letters),
        Parser("owner's request to the aggregator", (request,), requests),
        Parser("aggregator's answer", (answer,), answers),
        Parser("aggregator's answer, runs", (encoded(RunPage((entry,))),), lambda d: decoded(RunPage, d)),
        Parser("aggregator's answer, status", (encoded(status),), lambda d: decoded(FleetStatus, d)),
        Parser("aggregator", tuple(parcelled(t.encode(), p) for t, p in sent), whole),
        *(_uploaded(name, settings) for name, settings in STRATEGIES.items()),
    ]


def _uploaded(name, settings):
    """Return the parser of the last of three uploads of a round; one that is stored closes the round."""
    local = dataclasses.replace(FULL_BATCH, momentum=0.0)
    needs = {"ifca": 2}.get(name, 1)
    run = run_plan(name, settings, origins=needs, local=local, pretrain=local, rounds=5, quorum=1.0)
    server, devices = Identity.generate("aggregator"), [Identity.generate(f"dev-{i}") for i in range(3)]
    hostile = devices[2]
    roster = Roster(
        fleet="demo",
        sequence=3,
        issued_at_s=0,
        expires_at_s=1,
        aggregator=server.member,
        devices=tuple(d.member for d in devices),
        revoked=(),
    )
    engine: Engine = engine_of(run)
    state, _ = engine.begin(tuple(d.name for d in devices))
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device.name))
    for at, device in enumerate(devices[:2]):
        values = np.linspace(at, 1, run.length)
        mine, body = upload_of(engine, state, device.name, values=values, recipient=server.member.seal_key)
        state, _ = engine.handle(state, contribution_of(mine, _vector(body), 1.0))
    good, vector = upload_of(
        engine,
        state,
        hostile.name,
        values=np.linspace(-1, 1, run.length),
        signer=hostile,
        recipient=server.member.seal_key,
    )
    clear = Sealed("demo", "upload", hostile.name, server.name)

    def read(data):
        message, body, *_ = [*parts_of(data), b"", b""]
        sealed = seal_to_member(hostile, server.member.seal_key, clear, message, body)
        mark = Fingerprint.of(memoryview(sealed))
        transfer = Transfer(
            source=hostile.name,
            kind=ChunkKind.UPLOAD,
            round=1,
            transfer_id=mark.transfer_id,
            payload=memoryview(sealed),
            signed=mark.signed,
        )
        verified = UploadVerifier(server, run).upload(hostile.name, transfer, roster)
        decision, reason = engine.validate(state, verified.header, verified.digest)
        if decision is not Decision.STORE:
            raise UntrustedError(reason)
        contribution = contribution_of(verified.header, _vector(verified.body), verified.norm)
        after, _ = engine.handle(state, contribution)
        assert after.round >= state.round
        return after

    return Parser(f"upload to {name}", (parcelled(encode(good), vector),), read)


def _vector(body):
    return np.frombuffer(bytes(body), "<f4") if len(body) else None
