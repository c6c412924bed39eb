"""Parsers of what arrives by the network: chunks, topics, envelopes, and what each party makes of the messages inside."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from aggregator.engine import Engine, Verdict
from aggregator.events import CameOnline, Stored
from aggregator.intake import Intake
from aggregator.membership import AggregatorMembership
from aggregator.owner_mail import OwnerMail
from aggregator.strategies.base import contribution_of
from aggregator.strategies.registry import make_strategy, models_needed
from crypto.seal.envelope import open_from_group, open_from_member, read_head, seal_to_group, seal_to_member
from crypto.seal.grants import OWNER_NAME, make_card, open_card, open_grant, open_renewal
from crypto.seal.identity import Identity
from crypto.seal.roster import open_roster
from crypto.seal.tokens import PURPOSE, _key, _prove, make_request, open_request, token_id
from edge_client import agent
from edge_client.enrolment import DeviceMembership
from edge_client.inventory import Inventory
from edge_client.package import open_run
from edge_client.state import Mark, ModelFile
from fleet.admission import Registrar
from fleet.directory import Change, FleetSecrets
from fleet.tokens import TokenFile, TokenStore
from tests.helpers import fleets
from tests.helpers.parsers import Parser, parcelled, parts_of, text
from tests.helpers.plans import FULL_BATCH, engine_of, run_plan, upload_of
from wire import codec
from wire.address import BrokerAddress
from wire.codec import decode, decode_prefix, encode
from wire.documents import AggregatorGrant, Card, DeviceGrant, GrantFile, Member, Roster, RunPackage, RunPlan, Setting
from wire.enrolment import EnrolRequest, EnrolStatement, Token
from wire.epochs import Certificate, Checkpoint, Endorsement, Epoch, Origins, Proposal, SignedBy
from wire.errors import ShoalError, UntrustedError
from wire.faults import Hop
from wire.frame import ChunkKind, Fingerprint, split
from wire.frame import parse as parse_chunk
from wire.messages import Announcement, Control, ModelHeader, Presence, Sealed, Upload
from wire.reassembly import Reassembler, Transfer
from wire.topics import Topics
from wire.topics import parse as parse_topic
from wire.transport import Message

DEVICE = "dev-00"
STRATEGIES = {
    "fedavg": {},
    "ifca": {"k": 2},
    "cfl": {},
    "fedgroup": {"groups": 2, "alpha": 2, "eta_g": 0.1},
    "fesem": {"k": 2},
    "one-shot": {"k": 2},
    "local": {},
}


class Silent:
    """A transport on which nothing is heard: for parties whose answers don't matter."""

    bytes_sent = bytes_received = 0

    def start(self, *, require=False):
        """Do nothing."""

    def close(self):
        """Do nothing."""

    def subscribe(self, topic_filter):
        """Do nothing."""

    unsubscribe = subscribe

    def publish(self, topic, payload, *, retain=False):
        """Do nothing."""

    def pending(self):
        """Return that everything has gone."""
        return 0


class Scene:
    """A fleet in the middle of a run, and all that has been said in it so far."""

    def __init__(self, root):
        self.tap = fleets.Wiretap()
        options = {"algorithm": "ifca", "rounds": 3, "settings": {"k": "2"}, "seed": 2, "evaluate_every": 1}
        self.fleet = fleets.make_fleet(root / "scene", fleets.grouped_data(3, 2), faults=self.tap, **options)
        self.fleet.run_until(lambda: len(self.fleet.records()) == 2, 20)
        self.owner = self.fleet.stage.fleet
        self.group = fleets.group_key(self.fleet)
        self.aggregator = fleets.aggregator_identity(self.fleet)
        self.device = fleets.device_identity(self.fleet, DEVICE)
        self.membership = DeviceMembership(self.fleet.stage.device_dir(DEVICE))
        self.card = make_card(self.device, "device")
        self.token = TokenStore(self.owner).issue(3600, 1000)
        self.newcomer = Identity.generate("dev-77")
        self.package = (self.owner.path / "runs" / "000001.run").read_bytes()

    def passages(self, hop, client, *endings):
        """Return (topic, payload) of what went one way."""
        chosen = [p for p in self.tap.heard if p.hop is hop and p.client == self.fleet.client_id(client)]
        found = [(p.topic, p.payload) for p in chosen if p.payload and (not endings or p.topic.endswith(endings))]
        return list(dict.fromkeys(found))

    def payloads(self, *, ending="", starting="", sender="aggregator"):
        """Return the whole payloads that a party sent to topics of a kind."""
        by_base = defaultdict(list)
        for topic, payload in self.passages(Hop.UP, sender):
            if topic.endswith(ending) and starting in topic:
                by_base[topic].append(payload)
        return [whole for chunks in by_base.values() for whole in fleets.whole(chunks)]

    def plains(self, sender=None, **where):
        """Return what lies in group envelopes."""
        signer = self.aggregator if sender is None else fleets.device_identity(self.fleet, sender)
        found = []
        for sealed in self.payloads(sender=sender or "aggregator", **where):
            head, at = read_head(sealed)
            found.append(bytes(open_from_group(self.group, sealed, head, at, signer.member.sign_key)))
        return found

    def samples(self):
        """Return encoded messages by their type."""
        package = decode(self.package, RunPackage)
        request = make_request(self.newcomer, self.token, 1000)
        statement = encode(EnrolStatement("demo", "o", "a", "t", 1, 1, self.card))
        uploads = [
            fleets.open_upload(self.fleet, DEVICE, u)[0] for u in fleets.uploads_of(self.fleet, self.tap, DEVICE)
        ]
        grants = [(self.owner.path / "grants" / f"{n}.grant").read_bytes() for n in (DEVICE, "aggregator")]
        models = self.plains(starting="/s/model/")
        secrets = decode((self.owner.path / "secrets.bin").read_bytes(), FleetSecrets)
        found = {
            Announcement: self.plains(ending="/s/round"),
            ModelHeader: [encode(decode_prefix(m, ModelHeader)[0]) for m in models],
            Control: self.plains(ending=f"/{DEVICE}/ctl"),
            Upload: [encode(u) for u in uploads],
            Presence: self.plains(sender=DEVICE, ending="/state"),
            Roster: [self.owner.roster_bytes[64:]],
            Card: [self.card[64:]],
            Member: [encode(self.device.member)],
            RunPlan: [package.plan[64:]],
            RunPackage: [self.package],
            DeviceGrant: [encode(self.membership.grant)],
            AggregatorGrant: [encode(AggregatorMembership(self.fleet.stage.aggregator_dir).grant)],
            EnrolRequest: [request],
            EnrolStatement: [statement],
            Token: [encode(self.token)],
            GrantFile: grants,
            Sealed: [encode(Sealed("demo", "upload", DEVICE, "aggregator"))],
            FleetSecrets: [encode(secrets)],
            Change: [encode(Change(b"secrets", self.owner.roster_bytes))],
            TokenFile: [encode(TokenFile(self.token, 1000, ""))],
            Mark: [encode(Mark(1, 1, 2, bytes(16), bytes(16), 0))],
            ModelFile: [encode(ModelFile(1, bytes(16), 2, 0, 28))],
        }
        return _with_parts(found | _rollover(self.owner.roster_bytes))

    def close(self):
        """End the fleet."""
        self.fleet.close()


def _rollover(roster_bytes):
    """Return what travels at the end of a mask epoch."""
    checkpoint = Checkpoint("demo", bytes(16), 2, 1, 2, 0, b"k" * 16, 2, b"d" * 32)
    certificate = Certificate(checkpoint, roster_bytes, (SignedBy(DEVICE, b"s" * 64),))
    return {
        Epoch: [encode(Epoch(certificate, b"sealed"))],
        Certificate: [encode(certificate)],
        Proposal: [encode(Proposal(checkpoint, 1, 6))],
        Endorsement: [encode(Endorsement(b"s" * 64, (1, 2)))],
        Origins: [encode(Origins("demo", bytes(16), 2, 5, 2, 28))],
    }


def _with_parts(samples):
    """Return the samples together with the messages that are fields of them."""
    every = {kind: list(encoded) for kind, encoded in samples.items()}
    for kind, encoded in samples.items():
        for data in encoded:
            value = decode(data, kind)
            for field in dataclasses.fields(value):
                held = getattr(value, field.name)
                for part in held if isinstance(held, tuple) else (held,):
                    if type(part) in codec._KIND_OF:
                        every.setdefault(type(part), []).append(encode(part))
    return {kind: list(dict.fromkeys(encoded)) for kind, encoded in every.items()}


def parsers(scene):
    """Return the parsers of what the network brings."""
    return [*_outer(scene), *_sealed(scene), *_owners(scene), *_devices(scene), *_aggregators(scene)]


def _outer(scene):
    topics = sorted({p.topic for p in scene.tap.heard})
    chunks = split(bytes(range(256)) * 20, kind=ChunkKind.MODEL, round=1, chunk_bytes=1024)

    def reassemble(data):
        one = Reassembler(max_transfer_bytes=1 << 16, max_pending_bytes=1 << 17, max_per_source=2)
        refused = None
        for at, chunk in enumerate(parts_of(data)):
            try:
                one.add(f"s{at % 2}", chunk, float(at))
            except ShoalError as error:
                refused = error
            assert one.pending_bytes <= 1 << 17
        one.expire(1e9)
        assert one.pending_bytes == 0
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
    plan = dataclasses.replace(
        run_plan(name, origins=2 if origins == "2" else 1), settings=tuple(Setting(n, v) for n, _, v in pairs)
    )
    make_strategy(plan)
    return models_needed(plan)


def _sealed(scene):
    (upload, *_) = fleets.uploads_of(scene.fleet, scene.tap, DEVICE)
    (announcement, *_) = scene.payloads(ending="/s/round")
    grant = (scene.owner.path / "grants" / f"{DEVICE}.grant").read_bytes()

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
        Parser("grant", (grant,), lambda d: open_grant(scene.device, d, DeviceGrant, scene.owner.fingerprint)),
        Parser("renewed grant", (grant,), lambda d: open_renewal(scene.device, d, DeviceGrant, owner_key)),
        Parser(
            "signed roster",
            (scene.owner.roster_bytes,),
            lambda d: open_roster(d, owner_key=owner_key, fleet="demo", least_sequence=0, now_s=0),
        ),
        Parser("enrolment request", (make_request(scene.newcomer, scene.token, 1000),), _request(scene)),
    ]


def _request(scene):
    return lambda data: open_request(data, scene.token)


def _owners(scene):
    """What reaches the owner's desk: any bytes at a token's topic, and any card in a request that its token proves."""
    topics = Topics("demo")
    request = make_request(scene.newcomer, scene.token, 1000)
    name = scene.token.secret
    topic = topics.enrol(token_id(name))

    def registrar():
        made = Registrar(scene.owner, Silent())
        made.start(1000)
        return made

    def desk(data):
        where, _, payload = data.partition(b"|")
        registrar().on_event(Message(text(where), payload), 1000)

    def proven(data):
        """The statement is anything, sealed and proven by whoever holds the token."""
        head = Sealed("demo", PURPOSE, scene.newcomer.name, OWNER_NAME)
        plain = _prove(scene.token, data or b"x") + data
        sealed = seal_to_group(scene.newcomer, _key(scene.token), head, plain)
        return open_request(encode(EnrolRequest(scene.newcomer.member, sealed)), scene.token)

    card = make_card(scene.newcomer, "device")
    terms = (scene.token.fleet, scene.token.owner, scene.token.aggregator, token_id(name))
    statement = encode(EnrolStatement(*terms, scene.token.expires_at_s, 1000, card))
    (chunk,) = split(request, kind=ChunkKind.ENROL, round=0)
    return [
        Parser("owner's desk", (topic.encode() + b"|" + chunk,), desk),
        Parser("enrolment statement, proven", (statement,), proven),
    ]


def _devices(scene):
    """What reaches a device, from outside and from an aggregator that oversteps."""
    plan = scene.fleet.plan
    run = open_run(scene.package, scene.membership)
    state, _ = agent.step(agent.AgentState(0), agent.Planned(plan))
    announcements = scene.plains(ending="/s/round")
    sending = dataclasses.replace(state, stage=agent.Stage.SENDING, transfer=b"\1" * 16)
    model_topics = {t: None for t, _ in scene.passages(Hop.UP, "aggregator") if "/s/model/" in t}
    labelled = []
    for topic in model_topics:
        labelled += [parcelled(topic.split("/")[5].encode(), p) for p in scene.plains(ending=topic)]
    runtime = scene.fleet.devices[DEVICE].runtime
    heard = scene.passages(Hop.DOWN, DEVICE)

    def announced(data):
        after, do = agent.step(state, agent.Announced(decode(data, Announcement)))
        for action in do:
            if isinstance(action, agent.Work):
                Inventory(run, scene.group).thetas(action.announcement, action.order)
        return after

    def model(data):
        label, plain, *_ = [*parts_of(data), b"", b""]
        return Inventory(run, scene.group).take(text(label), bytes(16), memoryview(plain))

    def broadcast(data):
        return scene.membership.open_broadcast(memoryview(data), Fingerprint.of(memoryview(data)).signed)

    def whole(data):
        topic, payload, *_ = [*parts_of(data), b"", b""]
        runtime.on_event(Message(text(topic), payload), scene.fleet.now_s)

    grant = (scene.owner.path / "grants" / f"{DEVICE}.grant").read_bytes()
    return [
        Parser("announcement, by the aggregator", tuple(announcements), announced),
        Parser("model, by the aggregator", tuple(labelled), model),
        Parser(
            "control, by the aggregator",
            tuple(scene.plains(ending=f"/{DEVICE}/ctl")),
            lambda d: agent.step(sending, agent.Answered(decode(d, Control))),
        ),
        Parser("broadcast", tuple(scene.payloads(ending="/s/round")), broadcast),
        Parser("run package", (scene.package,), lambda d: open_run(d, scene.membership)),
        Parser("keys for a device", (grant,), scene.membership.take_grant),
        Parser("roster for a device", (scene.owner.roster_bytes,), scene.membership.adopt),
        Parser("device", tuple(parcelled(t.encode(), p) for t, p in heard), whole),
    ]


def _aggregators(scene):
    """What reaches the aggregator, from outside, from a hostile device and for each strategy."""
    membership = AggregatorMembership(scene.fleet.stage.aggregator_dir)
    mail = OwnerMail(membership)
    topics = Topics("demo")
    head = Sealed("demo", "roster", OWNER_NAME, membership.identity.name)
    roster = seal_to_member(scene.owner.owner, membership.identity.member.seal_key, head, scene.owner.roster_bytes)
    (letter,) = split(roster, kind=ChunkKind.ROSTER, round=0)
    service = scene.fleet.service
    sent = [pair for d in scene.fleet.stage.devices for pair in scene.passages(Hop.UP, d)]

    def letters(data):
        return mail.take(topics.owner_roster, data, 0.0)

    def whole(data):
        topic, payload, *_ = [*parts_of(data), b"", b""]
        service.on_event(Message(text(topic), payload), scene.fleet.now_s)

    return [
        Parser("owner's letter to the aggregator", (letter,), letters),
        Parser("aggregator", tuple(parcelled(t.encode(), p) for t, p in sent), whole),
        *(_uploaded(name, settings) for name, settings in STRATEGIES.items()),
    ]


def _uploaded(name, settings):
    """An upload by one of three devices whose other two have answered: what is stored closes the round."""
    local = dataclasses.replace(FULL_BATCH, momentum=0.0)
    needs = {"ifca": 2}.get(name, 1)
    run = run_plan(name, settings, origins=needs, local=local, pretrain=local, rounds=5, quorum=1.0)
    server, devices = Identity.generate("aggregator"), [Identity.generate(f"dev-{i}") for i in range(3)]
    hostile = devices[2]
    roster = Roster("demo", 3, 0, 1, server.member, tuple(d.member for d in devices), ())
    engine: Engine = engine_of(run)
    state, _ = engine.begin(tuple(d.name for d in devices))
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device.name))
    for at, device in enumerate(devices[:2]):
        values = np.linspace(at, 1, run.length)
        mine, body = upload_of(engine, state, device.name, values=values, recipient=server.member.seal_key)
        state, _ = engine.handle(state, Stored(contribution_of(mine, _vector(body), 1.0), bytes(32)))
    good, vector = upload_of(
        engine, state, hostile.name, values=np.linspace(-1, 1, run.length), recipient=server.member.seal_key
    )
    clear = Sealed("demo", "upload", hostile.name, server.name)

    def read(data):
        message, body, *_ = [*parts_of(data), b"", b""]
        sealed = seal_to_member(hostile, server.member.seal_key, clear, message, body)
        mark = Fingerprint.of(memoryview(sealed))
        transfer = Transfer(hostile.name, ChunkKind.UPLOAD, 1, mark.transfer_id, memoryview(sealed), mark.signed)
        opened = Intake(server, run).open(hostile.name, transfer, roster)
        verdict, reason = engine.judge(state, opened.upload, opened.digest)
        if verdict is not Verdict.STORE:
            raise UntrustedError(reason)
        after, _ = engine.handle(state, Stored(contribution_of(opened.upload, _vector(opened.body), opened.norm), b""))
        assert after.round >= state.round
        return after

    return Parser(f"upload to {name}", (parcelled(encode(good), vector),), read)


def _vector(body):
    return np.frombuffer(bytes(body), "<f4") if len(body) else None
