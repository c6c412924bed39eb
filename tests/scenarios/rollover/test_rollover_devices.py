"""Mask epochs under attack by devices: one that folds wrongly, answers with junk or was revoked in the middle of it."""

import dataclasses

import numpy as np
import pytest

from edge_client.run import rollover
from shoal.protocol.messages import Phase
from shoal.transport.base import Message
from tests.helpers.fleets import Wiretap, inject, make_one_key_fleet, open_upload, reasons, seal_upload, uploads_of
from tests.helpers.takeovers import open_step
from tests.scenarios.revocation.test_revocation import publish
from tests.scenarios.rollover.test_rollover import close_to, events_of, models_of


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """Device -> model of five devices after four rounds under one mask."""
    with make_one_key_fleet(tmp_path_factory.mktemp("undivided") / "fleet", count=5, rounds=4) as fleet:
        fleet.run(60)
        return models_of(fleet)


def test_a_device_that_always_folds_wrongly_is_outvoted_in_every_epoch(tmp_path, monkeypatch, undivided):
    """It costs one failed attempt when it is asked to fold, no deadline, and no bit of the models."""
    honest = rollover.folded
    turns = []

    def fold(shop, *args):
        turns.append(shop.identity.name)
        bad = shop.identity.name == "dev-02"
        monkeypatch.setattr(rollover, "folded", (lambda models: honest(models) + np.float32(0.01)) if bad else honest)
        try:
            return original(shop, *args)
        finally:
            monkeypatch.setattr(rollover, "folded", honest)

    original = rollover.fold
    monkeypatch.setattr(rollover, "fold", fold)
    with make_one_key_fleet(tmp_path / "fleet", count=5, rounds=4, epoch_rounds=1) as fleet:
        records = fleet.run(60)
        assert len(events_of(records)) == 3
        failed = events_of(records, "rollover-failed")
        assert len(failed) == turns.count("dev-02") >= 1
        assert all(e["reason"].endswith("0 of 5 devices signed the fold of dev-02") for e in failed)
        assert fleet.now_s < fleet.plan.deadline_s
        assert close_to(models_of(fleet), undivided)


def forged_answer(fleet, tap, name, attached, *, phase=None):
    """Send as ``name``, who is dead by now, an answer to the open step with ``attached`` after it."""
    state = fleet.service.state
    sample, _ = open_upload(fleet, name, uploads_of(fleet, tap, name)[-1])
    assignment = state.plan.assignments[name]
    upload = dataclasses.replace(
        sample,
        epoch=state.run.epoch,
        key_id=state.run.key_id,
        round=state.round,
        phase=int(phase or assignment.phase),
        nonce=fleet.service._engine.nonce(state.round, state.plan.step),
        length=0,
        margins=(),
        correct=0,
        tested=0,
        attached=len(attached),
    )
    inject(fleet, name, seal_upload(fleet, name, upload, attached))
    fleet.settle()


@pytest.mark.parametrize("attached", [b"junk", b"SHM1\x1f" + bytes(300), bytes(1 << 21)], ids=["junk", "zeros", "2 MB"])
def test_junk_from_the_device_that_folds_costs_nobody_anything(tmp_path, attached):
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=5, rounds=2, epoch_rounds=1) as fleet:
        open_step(fleet, Phase.CHECKPOINT)
        (folder,) = fleet.service.state.plan.assignments
        del fleet.devices[folder]  # the attacker answers in its place; its connection stays
        forged_answer(fleet, tap, folder, attached)
        told = sum(len(p.payload) for p in tap.sent(client=fleet.client_id("aggregator")) if "/s/model/" in p.topic)
        assert told < 1 << 20, "it is not handed on"
        fleet.broker.disconnect(fleet.client_id(folder))
        assert len(events_of(fleet.run(60))) == 1


def test_a_signer_that_answers_with_junk_is_one_signature_less(tmp_path):
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=5, rounds=2, epoch_rounds=1, deadline_s=5.0) as fleet:
        open_step(fleet, Phase.ENDORSE)
        signer = next(d for d in fleet.service.state.plan.assignments if d != fleet.service.state.rollover.folder)
        del fleet.devices[signer]
        forged_answer(fleet, tap, signer, b"SHM1 and no endorsement")
        records = fleet.run(60)
        (event,) = events_of(records)
        assert (event["signatures"], event["devices"]) == (4, 5)
        (refused,) = events_of(records, "endorsement-refused")
        assert refused["device"] == signer


def test_a_device_without_an_order_has_no_say(tmp_path, caplog):
    """Only the device that was asked folds; the others wait for their turn."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=3, rounds=2, epoch_rounds=1) as fleet:
        open_step(fleet, Phase.CHECKPOINT)
        state = fleet.service.state
        other = next(d for d in fleet.stage.devices if d not in state.plan.assignments)
        sample, body = open_upload(fleet, other, uploads_of(fleet, tap, other)[-1])
        nonce = fleet.service._engine.nonce(state.round, state.plan.step)
        early = dataclasses.replace(sample, phase=int(Phase.CHECKPOINT), nonce=nonce, length=0, attached=len(body))
        inject(fleet, other, seal_upload(fleet, other, early, body))
        fleet.broker.pump()
        assert any("not asked for" in r for r in reasons(caplog))
        assert len(events_of(fleet.run(60))) == 1


def test_whoever_was_revoked_in_the_middle_of_a_rollover_has_no_part_in_it(tmp_path):
    """It has signed already, for secrets that were replaced; under the new ones it is not asked."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=5, rounds=2, epoch_rounds=1, quorum=0.6) as fleet:
        open_step(fleet, Phase.ENDORSE)
        fleet.broker.pump()
        fleet.devices["dev-04"].worker.work()
        fleet.broker.pump()
        fleet.stage.fleet.revoke("dev-04")
        publish(fleet)
        records = fleet.run(100)
        (event,) = events_of(records)
        assert (event["signatures"], event["devices"]) == (4, 4)
        assert event["epoch"] == fleet.stage.fleet.secrets.mask_epoch
        stays = [fleet.model(d).theta.tobytes() for d in ("dev-00", "dev-01", "dev-02", "dev-03")]
        assert len(set(stays)) == 1
        assert not fleet.devices["dev-04"].runtime._membership.later


def test_a_revoked_device_that_folds_is_not_heard(tmp_path, caplog):
    """Its upload was in flight when the owner's roster arrived."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=5, rounds=2, epoch_rounds=1, quorum=0.6) as fleet:
        open_step(fleet, Phase.CHECKPOINT)
        (folder,) = fleet.service.state.plan.assignments
        rule = tap.lose(client=fleet.client_id(folder), ending="/up")
        fleet.settle()
        late = [p.payload for p in tap.sent(client=fleet.client_id(folder), ending="/up")][-1]
        fleet.stage.fleet.revoke(folder)
        publish(fleet)
        tap.forgive(rule)
        caplog.clear()
        fleet.broker.submit("attacker", Message(f"shoal/v1/demo/d/{folder}/up", late), lambda: None)
        records = fleet.run(100)
        assert f"{folder} is not in the roster" in reasons(caplog)
        (event,) = events_of(records)
        assert (event["signatures"], event["devices"]) == (4, 4)
