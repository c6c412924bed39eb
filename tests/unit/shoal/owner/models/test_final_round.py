"""The owner opens announcements and checkpoints, and takes no model that too few devices certify."""

import dataclasses

import numpy as np
import pytest

from crypto.seal.envelope import SealError, seal_to_group
from crypto.seal.identity import Identity
from edge_client.models.checkpoints import BadCheckpointError
from shoal.errors import ConfigError, IntegrityError, NotReadyError, ShoalError, UntrustedError, WireError
from shoal.membership.statements import sign_statement
from shoal.owner.models.final_round import FinalRound
from shoal.owner.models.reader import disagreements, open_presence
from shoal.protocol import channels
from shoal.protocol.codec import encode
from shoal.protocol.messages import Presence
from shoal.protocol.states import FORKED_ROUND, StateId, TranscriptHead
from tests.helpers.fleets import device_identity, group_key, make_fleet
from tests.helpers.plans import run_plan
from tests.helpers.round_runs import CLASSES, INPUTS, Scene, changed, origins
from tests.helpers.tasks import logistic_bundle

FINAL = 5
AT = (0, FINAL - 1)


class Ended:
    """A run of four rounds, after which all devices are at state (0, 4)."""

    def __init__(self, root):
        self.scene = Scene(root, "dev-1", "dev-2", "dev-3", rounds=FINAL - 1)
        self.parties, self.plan = self.scene.parties, self.scene.plan
        self.models = {name: self.moved(name) for name in self.parties.members}
        self.ref = self.scene.checkpoint("dev-1", self.models["dev-1"], AT, FINAL)
        self.last = self.announced(self.models)

    def moved(self, name):
        """Return the models of a device after the last training round."""
        models = self.scene.device(name)
        for round_ in range(1, FINAL):
            step = self.scene.step(round_, {0: np.full(self.plan.length, round_, np.float32)})
            self.scene.serve(models, self.scene.announcement(round_ + 1, steps=(step,)))
        return models

    def statement(self, name, head):
        member = self.parties.members[name]
        return sign_statement(member.identity, self.models[name].states.statement(name, FINAL, head))

    def announced(self, names, **changes):
        head = self.scene.announcement(FINAL, states={0: AT}).held.transcript
        signed = tuple(self.statement(name, head) for name in names)
        given = {"checkpoints": (self.ref,), "statements": signed, **changes}
        return self.scene.announcement(FINAL, states={0: AT}, **given)

    def sealed(self, announcement, signer=None, group=None):
        server = self.parties.server
        head = channels.ANNOUNCEMENT.head(self.plan.fleet, "aggregator")
        return seal_to_group(signer or server.identity, group or server.group, head, encode(announcement))

    def opened(self, announcement=None, **options):
        plans = {self.plan.run_id: self.plan}
        return FinalRound.open(self.sealed(announcement or self.last, **options), self.parties.owner, plans)

    def checkpoint(self):
        """Return the announced checkpoint as the aggregator publishes it."""
        server = self.parties.server
        head = channels.CHECKPOINT.head(self.plan.fleet, "aggregator")
        inner = self.scene.transfers[self.ref.label, self.ref.transfer]
        return seal_to_group(server.identity, server.group, head, inner)


@pytest.fixture
def ended(tmp_path):
    return Ended(tmp_path)


def finish(ended, announcement=None):
    last, roster = ended.opened(announcement), ended.parties.owner.roster
    opened = {ref.state: last.open_checkpoint(ref, ended.checkpoint(), roster) for ref in last.wanted().values()}
    return last.finished_run(opened, {}, roster)


def test_model_is_the_devices_bit_for_bit(ended):
    run = finish(ended)
    (model,) = run.models
    assert model.theta.tobytes() == ended.models["dev-2"].states.held[StateId(*AT)].theta.tobytes()
    assert np.allclose(model.theta, origins()[0] + 10, atol=1e-4)
    assert (model.own.sealed_by, model.own.sealed_in, len(model.own.certified_by)) == ("dev-1", FINAL, 2)
    assert (run.missing, run.bundle.digest, run.shared) == ({}, ended.plan.task_digest, None)


def test_too_few_statements_are_refused(ended):
    """One device can't sign twice."""
    few = "1 devices of the roster have signed state 4 of model 0, 2 are needed"
    for names in (["dev-1"], ["dev-1", "dev-1"]):
        with pytest.raises(BadCheckpointError, match=few):
            finish(ended, ended.announced(names))


def test_checkpoint_of_another_state(ended):
    """It is refused, and so is one with a task that is not the plan's."""
    ended.ref = dataclasses.replace(ended.scene.checkpoint("dev-2", ended.models["dev-2"], AT, 3), round=FINAL)
    with pytest.raises(BadCheckpointError, match="another state, round or fleet"):
        finish(ended, ended.announced(["dev-1", "dev-2"], checkpoints=(ended.ref,)))
    other = logistic_bundle(INPUTS + 1, CLASSES).to_bytes()
    ended.ref = ended.scene.checkpoint("dev-1", ended.models["dev-1"], AT, FINAL, task=other)
    with pytest.raises(IntegrityError):
        finish(ended, ended.announced(["dev-1", "dev-2"], checkpoints=(ended.ref,)))


def test_foreign_announcement_is_refused(ended):
    """And a run that the owner does not have is named."""
    with pytest.raises(UntrustedError):
        ended.opened(signer=Identity.generate("aggregator"))
    with pytest.raises(UntrustedError, match="names another key version"):
        ended.opened(changed(ended.last, key_version=9))
    with pytest.raises(ConfigError, match="holds no signed run of the id that is announced as run 1"):
        FinalRound.open(ended.sealed(ended.last), ended.parties.owner, {})


def test_keys_that_are_gone_are_named(ended):
    sealed, owner = ended.sealed(ended.last), ended.parties.owner
    owner.rotate()
    plans = {ended.plan.run_id: ended.plan}
    assert FinalRound.open(sealed, owner, plans).version.number == ended.plan.key_version
    owner.forget_versions_before(owner.roster.keys_since)
    with pytest.raises(ConfigError, match="does not hold the keys of the key version"):
        FinalRound.open(sealed, owner, plans)


@pytest.mark.parametrize("checkpoints", ["none", "of an earlier state"])
def test_an_open_final_round_is_not_ready(ended, checkpoints):
    refs = ()
    if checkpoints != "none":
        refs = (dataclasses.replace(ended.ref, state=StateId(0, 3), round=4),)
    with pytest.raises(NotReadyError, match="the final round of run 1 is open, or fewer than 2 devices"):
        ended.opened(ended.announced(["dev-1", "dev-2"], checkpoints=refs)).wanted()
    with pytest.raises(NotReadyError, match="run 1 is in round 3 of 4"):
        ended.opened(ended.scene.announcement(3)).wanted()


def test_no_model_at_all_is_an_error(ended):
    """No model at all is an error with the reason."""
    last = ended.opened()
    with pytest.raises(UntrustedError, match="no model of run 1 can be had; model 0: torn"):
        last.finished_run({}, {StateId(*AT): "torn"}, ended.parties.owner.roster)


# -- Heads of the transcript in devices' presences: which ones the owner believes, and what it concludes from them --


RUN, OTHER_RUN = b"r" * 16, b"s" * 16
HEAD = TranscriptHead(RUN, 20, b"a" * 32)
OTHER = dataclasses.replace(HEAD, transcript=b"b" * 32)
LEFT = dataclasses.replace(HEAD, round=FORKED_ROUND)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with make_fleet(tmp_path_factory.mktemp("histories") / "fleet") as made:
        yield made


def sealed(fleet, device="dev-01", *, signer=None, group=None, head=HEAD, purpose="presence", inside="dev-01"):
    outer = dataclasses.replace(channels.PRESENCE.head("demo", device), purpose=purpose)
    signer = signer or device_identity(fleet, device)
    return seal_to_group(signer, group or group_key(fleet), outer, encode(Presence("demo", inside, 7, True, head=head)))


@pytest.mark.parametrize("head", [HEAD, None])
def test_the_head_in_a_presence_is_read(fleet, head):
    assert open_presence(sealed(fleet, head=head), "dev-01", fleet.stage.fleet).head == head


def test_read_under_an_earlier_version(tmp_path):
    """It is read under an earlier key version."""
    with make_fleet(tmp_path / "fleet") as fleet:
        before = sealed(fleet)
        fleet.stage.fleet.rotate()
        assert open_presence(before, "dev-01", fleet.stage.fleet).head == HEAD


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": Identity.generate("dev-01")},
        {"device": "dev-02"},
        {"purpose": "announcement"},
        {"group": bytes(32)},
        {"inside": "dev-02"},
    ],
    ids=["signer", "device", "purpose", "group", "of another"],
)
def test_foreign_presence_is_refused(fleet, changes):
    """A presence that is not the device's own, is cut, or is from outside the roster."""
    if "group" in changes:
        changes = {"group": dataclasses.replace(group_key(fleet), secret=changes["group"])}
    for message in (sealed(fleet, **changes), sealed(fleet)[:-9]):
        with pytest.raises((SealError, WireError, ShoalError)):
            open_presence(message, "dev-01", fleet.stage.fleet)
    with pytest.raises(ShoalError, match="no presence of dev-09"):
        open_presence(sealed(fleet), "dev-09", fleet.stage.fleet)


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ({}, []),
        ({"pi-1": HEAD, "pi-2": HEAD}, []),
        ({"pi-1": HEAD, "pi-2": dataclasses.replace(OTHER, round=21)}, []),
        ({"pi-1": HEAD, "pi-2": dataclasses.replace(OTHER, run_id=OTHER_RUN)}, []),
        (
            {"pi-1": HEAD, "pi-2": HEAD, "pi-3": OTHER},
            ["two histories of run 3: the heads of round 20 differ between pi-1, pi-2; pi-3"],
        ),
        (
            {"pi-1": LEFT, "pi-2": HEAD},
            ["pi-1 has left run 3: the aggregator has shown it another history than before or than others"],
        ),
        ({"pi-1": dataclasses.replace(OTHER, round=21)}, []),
        (
            {"pi-1": dataclasses.replace(OTHER, round=22), "pi-2": HEAD},
            ["pi-1 states the history of round 22 of run 3, which has 20 rounds"],
        ),
    ],
    ids=[
        "none",
        "equal",
        "other rounds",
        "an unknown run",
        "a fork",
        "a device that has left",
        "the final round",
        "beyond it",
    ],
)
def test_heads_of_one_round_are_compared(heads, found):
    assert disagreements(heads, {RUN: run_plan(run=3)}) == found
