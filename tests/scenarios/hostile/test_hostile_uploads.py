"""Uploads that must change nothing: every variant is refused, and the true upload still counts afterwards."""

import dataclasses

import numpy as np
import pytest

from crypto.seal.identity import Identity, peek_document, sign_document
from edge_client.learning.data import Dataset
from edge_client.models.checkpoints import seal_checkpoint
from shoal.membership.statements import sign_statement
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Action, Phase, Sealed
from shoal.protocol.states import SealedCheckpoints, Statement
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from tests.helpers.fleets import (
    Wiretap,
    answers,
    device_identity,
    grouped_data,
    inject,
    make_fleet,
    open_upload,
    reasons,
    seal_upload,
    thetas,
    uploads_of,
    with_body,
)
from tests.scenarios.round_fleets import round_keys

VICTIM = "dev-02"
D = 28


@dataclasses.dataclass
class Bench:
    """A fleet in round 1 that waits for nothing but the victim's upload, which is known and withheld."""

    fleet: object
    tap: Wiretap
    rule: object
    upload: object
    body: bytes

    def send(self, sealed, topic_of=None):
        inject(self.fleet, VICTIM, sealed, topic_of=topic_of)
        self.fleet.settle()

    def released(self):
        """Let the true upload through and return the records of the whole run."""
        self.tap.forgive(self.rule)
        return self.fleet.run(30)


@pytest.fixture
def bench(tmp_path, caplog, tap):
    with make_fleet(tmp_path / "fleet", faults=tap, rounds=1, quorum=1.0, norm_limit=50.0) as fleet:
        rule = tap.lose(client=fleet.client_id(VICTIM), ending="/up")
        fleet.run_until(lambda: uploads_of(fleet, tap, VICTIM), 5)
        fleet.settle()
        upload, body = open_upload(fleet, VICTIM, uploads_of(fleet, tap, VICTIM)[0])
        assert upload.length == D
        caplog.clear()
        yield Bench(fleet, tap, rule, upload, body)


def changed(**fields):
    return lambda b: seal_upload(b.fleet, VICTIM, dataclasses.replace(b.upload, **fields), b.body)


def sealed(**of):
    """Return the upload sealed by another signer, or for another recipient, which are functions of the bench."""
    return lambda b: seal_upload(b.fleet, VICTIM, b.upload, b.body, **{part: made(b) for part, made in of.items()})


def with_values(values):
    return lambda b: seal_upload(b.fleet, VICTIM, *with_body(b.upload, values))


def spoiled(position, value):
    values = np.zeros(D, np.float32)
    values[position] = value
    return with_values(values)


def stated(signer, upload_round=1, **fields):
    """Return the upload with a statement that the device ``signer`` has signed."""

    def make(bench):
        true = peek_document(bench.upload.statement, Statement)
        statement = sign_statement(device_identity(bench.fleet, signer), dataclasses.replace(true, **fields))
        return changed(statement=statement, round=upload_round)(bench)

    return make


def signed_for_it(bench):
    true = peek_document(bench.upload.statement, Statement)
    return changed(statement=sign_document(device_identity(bench.fleet, "dev-01"), true))(bench)


def unasked(bench):
    """A checkpoint of the origin, which every device holds."""
    keys, fleet = round_keys(bench.fleet, 1), bench.fleet
    (state,) = fleet.devices[VICTIM].runtime._models.states.held.values()
    sealed = seal_checkpoint(device_identity(fleet, VICTIM), keys, state).payload
    attached = encode(SealedCheckpoints((0,), (len(sealed),))) + sealed
    upload = dataclasses.replace(bench.upload, attached=len(attached))
    return seal_upload(fleet, VICTIM, upload, bench.body + attached)


def with_head(**fields):
    def make(bench):
        head = Sealed("demo", "upload", VICTIM, "aggregator")
        return seal_upload(bench.fleet, VICTIM, bench.upload, bench.body, head=dataclasses.replace(head, **fields))

    return make


AT_THE_DOOR = {
    "signed by another device": (
        sealed(signer=lambda b: device_identity(b.fleet, "dev-01")),
        "a sealed message was refused",
    ),
    "signed by a stranger": (sealed(signer=lambda _: Identity.generate(VICTIM)), "a sealed message was refused"),
    "sealed to another aggregator": (
        sealed(recipient=lambda _: Identity.generate("aggregator").member),
        "a sealed message was refused",
    ),
    "head of another purpose": (with_head(purpose="control"), "a sealed 'control' of"),
}

FALSE_HEADS = {
    "another fleet": (with_head(fleet="other"), "of 'other'"),
    "another sender": (with_head(sender="dev-01"), "a sealed 'upload' of 'dev-01'"),
    "another recipient": (with_head(recipient="dev-01"), "to 'dev-01'"),
}

BY_THE_RULES = {
    "header of another fleet": (changed(fleet="other"), "an upload for 'other'"),
    "header of another device": (changed(device="dev-01"), "by 'dev-01'"),
    "bound to another aggregator": (changed(recipient=bytes(32)), "for another aggregator"),
    "fewer bytes than announced": (lambda b: seal_upload(b.fleet, VICTIM, b.upload, b.body[:-4]), "108 bytes where 28"),
    "another number of the run": (changed(run=2), "of another run or task"),
    "no header": (
        lambda b: seal_upload(b.fleet, VICTIM, Sealed("demo", "upload", VICTIM, "aggregator"), b""),
        "the header: ",
    ),
    "NaN in the first place": (spoiled(0, np.nan), "NaN"),
    "NaN in the last place": (spoiled(D - 1, np.nan), "NaN"),
    "infinity": (spoiled(3, -np.inf), "NaN or infinities"),
    "a norm that overflows": (with_values(np.full(D, 3e38, np.float32)), "overflows"),
    "just over the norm limit": (spoiled(5, 50.001), "above the plan's limit"),
    "another key version": (changed(key_version=7), "masked under another key"),
    "no statement about its states": (changed(statement=b""), "the statement about its states: "),
    "a statement that another device has signed": (signed_for_it, "the statement about its states: "),
    "a statement about another round": (stated(VICTIM, round=9), "a statement of another device, round or run"),
    "a statement about another run": (stated(VICTIM, run_id=bytes(16)), "a statement of another device, round or run"),
    "a statement of another device": (stated("dev-01", device="dev-01"), "a statement of another device, round or run"),
    "a checkpoint that nobody ordered": (unasked, "bytes attached to the update"),
    "another mask mode": (changed(mode="none"), "masked under another key or mode"),
    "another run": (changed(run_id=bytes(16)), "a statement of another device, round or run"),
    "another task": (changed(task_digest=bytes(32)), "of another run or task"),
    "another round's nonce": (changed(nonce=bytes(16)), "the round is not open"),
    "a later round": (stated(VICTIM, round=2, upload_round=2), "the round is not open"),
    "another phase": (changed(phase=int(Phase.SCORE)), "not asked for"),
    "a model that was not offered": (changed(model=1), "a model that was not offered"),
    "a longer vector": (with_values(np.zeros(D + 1, np.float32)), "a vector of length 29"),
    "no vector": (with_values(np.zeros(0, np.float32)), "a vector of length 0"),
    "margins that nobody asked for": (changed(margins=(0.0,)), "1 margins"),
    "more hits than tries": (changed(correct=2, tested=1), "impossible counts"),
    "no samples": (changed(samples=0), "impossible counts"),
}


@pytest.mark.parametrize("case", AT_THE_DOOR)
def test_unauthentic_gets_no_answer(bench, caplog, case):
    """What is not authentic gets no answer and changes nothing."""
    make, expected = AT_THE_DOOR[case]
    bench.send(make(bench))
    (reason,) = reasons(caplog)
    assert expected in reason
    assert not answers(bench.fleet, bench.tap, VICTIM)
    assert [r["contributed"] for r in bench.released()] == [3, 3]


@pytest.mark.parametrize("case", FALSE_HEADS)
def test_signer_of_false_envelope_is_named(bench, caplog, case):
    """A device that signs a false envelope is named and not waited for."""
    make, expected = FALSE_HEADS[case]
    bench.send(make(bench))
    assert expected in reasons(caplog)[0]
    assert not answers(bench.fleet, bench.tap, VICTIM)
    watched = bench.fleet.service.watch.devices.devices
    assert [name for name, facts in watched.items() if facts.refused] == [VICTIM]
    assert expected in watched[VICTIM].refused
    assert bench.fleet.service.status().endswith(f"upload refused: {VICTIM}")
    assert [r["contributed"] for r in bench.released()] == [3, 3]


def test_moved_message_names_nobody(bench, caplog):
    """A device's true upload on another device's topic, or as a decline: its signer is not to blame."""
    inject(bench.fleet, VICTIM, changed()(bench), topic_of="dev-01")
    for chunk in split(changed()(bench), kind=ChunkKind.DECLINE, round=1):
        bench.fleet.broker.submit("attacker", Message(Topics("demo").up(VICTIM), chunk), lambda: None)
    bench.fleet.settle()
    assert len(reasons(caplog)) == 2
    assert "on dev-01's topic" in reasons(caplog)[0]
    assert not any(facts.refused for facts in bench.fleet.service.watch.devices.devices.values())
    assert [r["contributed"] for r in bench.released()] == [3, 3]


@pytest.mark.parametrize("case", BY_THE_RULES)
def test_what_breaks_a_rule_is_refused(bench, caplog, case):
    """What breaks a rule is refused with the reason."""
    make, expected = BY_THE_RULES[case]
    bench.send(make(bench))
    assert any(expected in reason for reason in reasons(caplog))
    (control,) = answers(bench.fleet, bench.tap, VICTIM)
    assert control.action == Action.REFUSED
    assert expected in control.reason
    assert [r["contributed"] for r in bench.released()] == [3, 3]


def test_too_large_updates_are_told(tmp_path, caplog, tap):
    """Its own honest upload is refused once a round, never resent, and it takes part in the next and the final round."""
    data = grouped_data(3)
    loud = data[VICTIM]
    data[VICTIM] = Dataset(loud.x * np.float32(1e4), loud.y)
    with make_fleet(tmp_path / "fleet", data, faults=tap, rounds=2, quorum=0.6, norm_limit=50.0) as fleet:
        records = fleet.run(300)
        assert [r["contributed"] for r in records] == [2, 2, 3]
        assert [r["missing"] for r in records] == [[VICTIM], [VICTIM], []]
        refusals = [a for a in answers(fleet, tap, VICTIM) if a.action == Action.REFUSED]
        assert [a.round for a in refusals] == [1, 2]
        assert all("above the plan's limit 50" in a.reason for a in refusals)
        assert len(uploads_of(fleet, tap, VICTIM)) == 3
        assert len(set(thetas(fleet).values())) == 1


def test_an_unknown_device_is_refused(bench, caplog):
    stranger = Identity.generate("dev-99")
    upload = dataclasses.replace(bench.upload, device="dev-99")
    head = Sealed("demo", "upload", "dev-99", "aggregator")
    bench.send(seal_upload(bench.fleet, "dev-99", upload, bench.body, signer=stranger, head=head), topic_of="dev-99")
    assert reasons(caplog) == ["dev-99 is not in the roster"]
    assert [r["contributed"] for r in bench.released()] == [3, 3]


def test_second_upload_of_round_is_refused(bench, caplog):
    """The first durable upload wins; another vector under the same name is refused, also before the commit."""
    other = seal_upload(bench.fleet, VICTIM, *with_body(bench.upload, np.ones(D, np.float32)))
    bench.send(changed()(bench))
    records = bench.fleet.records()
    assert [r["contributed"] for r in records] == [3]
    bench.send(other)
    assert "the round is not open" in reasons(caplog)[0]


def test_two_before_one_commit_count_once(bench, caplog):
    """Two uploads before one commit count once."""
    other = seal_upload(bench.fleet, VICTIM, *with_body(bench.upload, np.ones(D, np.float32)))
    inject(bench.fleet, VICTIM, changed()(bench))
    bench.send(other)
    assert "another upload came before" in reasons(caplog)[0]
    (record, *_) = bench.fleet.records()
    assert record["norms"][VICTIM] == pytest.approx(np.linalg.norm(np.frombuffer(bench.body, "<f4")), rel=1e-6)


@pytest.mark.parametrize("payload", [b"", b"x", b"SHL1", bytes(60), b"SHL1" + bytes(100)])
def test_garbage_disturbs_nobody(bench, payload):
    """Neither side dies, and the run ends as if nothing had been said."""
    root = "shoal/v1/demo"
    for leaf in ("d/dev-02/up", "d/dev-02/state", "d/dev-02/ctl", "s/round", "s/plan", "s/roster", "s/model/x", "s/y"):
        bench.fleet.broker.submit("attacker", Message(f"{root}/{leaf}", payload), lambda: None)
    assert [r["contributed"] for r in bench.released()] == [3, 3]
