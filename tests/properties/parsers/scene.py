"""A fleet in the middle of a run, whose traffic gives parsers the bytes that they take."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from contextlib import nullcontext

from shoal_lab.loopback.transport import Hop

from aggregator.membership import AggregatorMembership
from crypto.seal.envelope import open_from_group, read_head
from crypto.seal.identity import Identity, sign_document
from edge_client.membership import DeviceMembership, EarlierVersion, EarlierVersions
from edge_client.models.fresh_start import TensorFigures
from edge_client.models.private_values import PrivateFile
from edge_client.storage.finished_models import (
    CandidateFit,
    FinishedList,
    FinishedModel,
    FinishedNode,
    PersonalChoice,
    RollbackChoice,
    Validation,
)
from edge_client.storage.pending_upload import Mark, ResidualHead
from edge_client.storage.scales import Scale
from edge_client.storage.state import ModelFile
from shoal.errors import UntrustedError
from shoal.membership.backup import Backup, BackupFile, LastBackup
from shoal.membership.enrol_requests import make_request
from shoal.membership.roster_changes import roster_change
from shoal.owner.enrolment.admission import make_refusal
from shoal.owner.enrolment.tokens import TokenFile, TokenStore
from shoal.owner.keys.receiving import ReceivingFile
from shoal.owner.keys.vault import Change, FleetSecrets, StoredVersions, VersionSecrets
from shoal.protocol import codec
from shoal.protocol.chunking import parse
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import (
    AggregatorGrant,
    Card,
    DeviceGrant,
    GrantFile,
    Member,
    ModelChoice,
    ReceivingNotice,
    Roster,
    RosterChange,
    RunPackage,
    RunPlan,
    Schedule,
)
from shoal.protocol.enrolment import EnrolRefusal, EnrolRequest, EnrolStatement, Token
from shoal.protocol.messages import (
    Announcement,
    Control,
    Decline,
    DeclineReason,
    ModelsHeld,
    Notice,
    Presence,
    Reminder,
    Sealed,
    Upload,
    Vitals,
)
from shoal.protocol.requests import Outcome, OwnerAnswer, OwnerRequest, RequestAction
from tests.helpers import fleets, model_states
from tests.helpers.owner_requests import request_of
from tests.helpers.receiving import RECEIVING, device_card

DEVICE = "dev-00"


class Silent:
    """A transport on which nothing is heard: for parties whose answers don't matter."""

    chunk_bytes = 1 << 16
    bytes_sent = bytes_received = 0

    def start(self, *, require=False):
        """Do nothing."""

    def close(self):
        """Do nothing."""

    def subscribe(self, topic_filter):
        """Do nothing."""

    unsubscribe = subscribe

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):
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
        self.fleet.run_until(lambda: self.fleet.closed() == 2, 20)
        self.owner = self.fleet.stage.fleet
        self.group = fleets.group_key(self.fleet)
        self.aggregator = fleets.aggregator_identity(self.fleet)
        self.device = fleets.device_identity(self.fleet, DEVICE)
        self.membership = DeviceMembership(self.fleet.stage.device_dir(DEVICE))
        self.card = device_card(self.device)
        self.notice = sign_document(self.device, ReceivingNotice("demo", DEVICE, RECEIVING.public))
        self.token = TokenStore(self.owner).issue(1, 3600, 1000)[0]
        self.newcomer = Identity.generate("dev-77")
        self.package = (self.owner.path / "runs" / "000001.run").read_bytes()

    def lose_final_upload(self, name):
        """Lose a device's upload of the final round."""
        client, final = self.fleet.client_id(name), self.fleet.plan.recipe.rounds + 1

        def rule(passage):
            mine = fleets.Rule((), client, "/up").concerns(passage)
            return fleets.LOST if mine and parse(passage.payload)[0].round == final else None

        self.tap.rules.append(rule)

    def new_grant(self):
        """Return a grant that the device can open, since its card brings its newest receiving keys."""
        card = self.membership.directory / f"{DEVICE}.card"
        return self.owner.add_device(card.read_bytes()).read_bytes()

    def passages(self, hop, client, *endings):
        """Return (topic, payload) of the messages in one direction."""
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
        """Return the plaintexts of group envelopes."""
        signer = self.aggregator if sender is None else fleets.device_identity(self.fleet, sender)
        found = []
        for sealed in self.payloads(sender=sender or "aggregator", **where):
            head, at = read_head(sealed)
            found.append(bytes(open_from_group(self.group, sealed, head, at, signer.member.sign_key)))
        return found

    def samples(self):
        """Return encoded messages by their type."""
        package = decode(self.package, RunPackage)
        request = make_request(self.newcomer, self.token, 1000, RECEIVING.public)
        statement = encode(
            EnrolStatement(
                fleet="demo", owner="o", aggregator="a", token="t", expires_at_s=1, asked_at_s=1, card=self.card
            )
        )
        refusal = make_refusal(self.owner.owner, "demo", "t", self.newcomer.member, UntrustedError("no", hint="ask"))
        uploads = [
            fleets.open_upload(self.fleet, DEVICE, u)[0] for u in fleets.uploads_of(self.fleet, self.tap, DEVICE)
        ]
        grants = [(self.owner.path / "grants" / f"{n}.grant").read_bytes() for n in (DEVICE, "aggregator")]
        secrets = decode((self.owner.path / "secrets.bin").read_bytes(), FleetSecrets)
        found = {
            **model_states.samples(),
            Announcement: self.plains(ending="/s/round"),
            Schedule: [encode(Schedule(order=bytes(16), count=3, interval_s=60, until_s=9, turn=2))],
            ModelsHeld: [encode(ModelsHeld(run=1, run_id=bytes(16), transcript=bytes(32), models=3, own=(0, 2)))],
            Control: self.plains(ending=f"/{DEVICE}/ctl"),
            Upload: [encode(u) for u in uploads],
            Decline: [encode(Decline("demo", DEVICE, bytes(16), bytes(16), int(DeclineReason.DATA)))],
            Reminder: [
                encode(
                    Reminder(
                        fleet="demo",
                        device=DEVICE,
                        run_id=bytes(16),
                        round=1,
                        transfer=bytes(16),
                        digest=bytes(32),
                        size=6,
                        chunk_bytes=1024,
                        turn=1,
                    )
                )
            ],
            OwnerRequest: [encode(request_of(RequestAction.LOGS, run=1, records=3))],
            OwnerAnswer: [
                encode(OwnerAnswer(fleet="demo", request=bytes(16), outcome=Outcome.DONE, accepted=7, answered_at_s=1))
            ],
            Presence: self.plains(sender=DEVICE, ending="/state"),
            Notice: self.plains(ending="/s/notice"),
            Vitals: [encode(Vitals(load=0.5, cores=4, temperature_c=48.5, battery_percent=80, charging=True))],
            ModelChoice: [encode(ModelChoice(fleet="demo", sequence=3, run=1, run_id=b"r" * 16, latest=2))],
            Roster: [self.owner.roster_bytes[64:]],
            RosterChange: [encode(roster_change(None, self.owner.roster, self.owner.roster_bytes))],
            Card: [self.card[64:]],
            Member: [encode(self.device.member)],
            RunPlan: [package.plan[64:]],
            RunPackage: [self.package],
            DeviceGrant: [encode(self.membership.grant)],
            AggregatorGrant: [encode(AggregatorMembership(self.fleet.stage.aggregator_dir).grant)],
            EnrolRequest: [request],
            EnrolStatement: [statement],
            EnrolRefusal: [refusal[64:]],
            Token: [encode(self.token)],
            GrantFile: grants,
            Sealed: [encode(Sealed("demo", "upload", DEVICE, "aggregator"))],
            FleetSecrets: [encode(secrets)],
            Change: [encode(Change(b"secrets", self.owner.roster_bytes))],
            ReceivingNotice: [self.notice[64:]],
            ReceivingFile: [(self.owner.path / "receiving.bin").read_bytes()],
            StoredVersions: [encode(StoredVersions().adding(VersionSecrets(4, bytes(32), bytes(32))))],
            Backup: [encode(Backup(1, "reef", 7, 1000, (BackupFile("runs/run-000001", b"run"),)))],
            ResidualHead: [encode(ResidualHead(run_id=bytes(16), round=2, model=0, transfer=bytes(16), length=28))],
            LastBackup: [encode(LastBackup(7, 1000))],
            TokenFile: [encode(TokenFile(self.token, 1000, ""))],
            EarlierVersions: [encode(EarlierVersions((EarlierVersion(7, 3, bytes(32)),)))],
            Mark: [
                encode(
                    Mark(roster=1, run=1, round=2, nonce=bytes(16), transcript=bytes(32), transfer=bytes(16), length=0)
                )
            ],
            ModelFile: [encode(ModelFile(1, bytes(16), 2, 0, 28))],
        }
        return _with_parts(found | _finished())

    def close(self):
        """End the fleet."""
        self.fleet.close()


def _finished():
    """Return {type: encodings} of a device's list of finished models."""
    validation = Validation(0.5, 8, 10, 10)
    node = FinishedNode(1, bytes(32))
    model = FinishedModel(
        run=1,
        run_id=bytes(16),
        round=4,
        algorithm="cfl",
        task=bytes(32),
        finished_at_s=1_800_000_000,
        validation=validation,
        own=node,
        above=(node,),
    )
    fit = CandidateFit("alone", 0.5)
    choice = PersonalChoice(
        version=1,
        run_id=bytes(16),
        choice="alone",
        by_hand=False,
        fits=(fit,),
        samples=10,
        folds=5,
        took_s=1.5,
        made_at_s=1_800_000_000,
        length=0,
    )
    figures = TensorFigures((0.0, 1.0), (0.1, 0.0))
    private = PrivateFile(bytes(16), 4, 3)
    found = (
        fit,
        choice,
        figures,
        Scale(bytes(16), (0.5, 1.0), (1.0, 2.0)),
        private,
        validation,
        node,
        model,
        FinishedList(1, (model,)),
        RollbackChoice(bytes(16), bytes(16)),
    )
    return {type(value): [encode(value)] for value in found}


def _with_parts(samples):
    """Return the samples together with the messages that are fields of them, at any depth."""
    every = {kind: dict.fromkeys(encoded) for kind, encoded in samples.items()}
    waiting = [decode(data, kind) for kind, encoded in samples.items() for data in encoded]
    while waiting:
        value = waiting.pop()
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            for part in held if isinstance(held, tuple) else (held,):
                if type(part) in codec._KIND_OF and encode(part) not in every.setdefault(type(part), {}):
                    every[type(part)][encode(part)] = None
                    waiting.append(part)
    return {kind: list(encoded) for kind, encoded in every.items()}
