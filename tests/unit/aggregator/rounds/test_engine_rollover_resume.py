"""A restart in the middle of a rollover, or between the epoch and its first round."""

import dataclasses

import pytest

from aggregator.rounds.events import CameOnline, Left
from shoal.protocol.messages import Phase
from tests.helpers.rollovers import DEVICES, Scene, changed, dropped


def test_a_restart_between_the_epoch_and_its_first_round_goes_on_there():
    """Also the count of steps: devices have seen those of the rollover that is over."""
    scene = Scene().due()
    scene.offline("dev-3", "dev-4")
    scene.fold()
    scene.sign("dev-1", "dev-2")
    scene.online("dev-3", "dev-4")
    scene.deadline()
    scene.fold()
    scene.sign("dev-1", "dev-2", "dev-3")
    scene.offline("dev-1", "dev-2", "dev-3", "dev-4")
    assert scene.kinds == ["Renewed", "Gather"]
    done = next(a for a in scene.actions if type(a).__name__ == "Renewed")
    state, actions = scene.engine.resume(
        DEVICES, done.state, done.round, (), done.metadata, None, scene.roster, scene.roster_bytes
    )
    assert [type(a).__name__ for a in actions] == ["Gather"]
    assert (state.run.epoch, state.since, state.round, state.step) == (2, 2, 2, scene.state.step)
    assert state.step > 1


@pytest.mark.parametrize("point", ["folding", "signing", "second try"])
def test_a_restart_opens_the_same_step_again(point):
    scene = Scene().due()
    if point == "second try":
        scene.deadline()
    if point == "signing":
        scene.fold()
    proposal = scene.state.rollover.proposal
    again = dropped(scene, proposal=proposal)
    assert again.place == scene.place
    assert again.opened.plan == scene.opened.plan
    assert again.opened.nonce == scene.opened.nonce
    assert again.state.rollover == scene.state.rollover
    assert again.opened.proposal == scene.opened.proposal
    if point != "signing":
        again.fold()
    again.sign(*DEVICES)
    assert again.kinds == ["Renewed", "OpenRound"]


def test_a_restart_that_has_lost_the_fold_has_it_folded_again():
    """Its upload was forgotten and the next step not yet announced."""
    scene = Scene().due()
    scene.fold()
    again = dropped(scene, proposal=None)
    assert {o.phase for o in again.state.plan.assignments.values()} == {Phase.CHECKPOINT}


def test_a_restart_after_the_folder_was_revoked_asks_another():
    scene = Scene().due()
    (folder,) = scene.state.plan.assignments
    scene.roster = changed(scene.roster, sequence=4, revoked=(folder,))
    again = dropped(scene)
    again.feed(Left(folder))
    assert folder not in again.state.plan.assignments
    assert again.state.plan.assignments


def test_a_restart_after_a_failed_try_repeats_no_step():
    """Devices have answered those that were announced: the next one has another number, and another folder."""
    scene = Scene().due()
    (first,) = scene.state.plan.assignments
    scene.fold(digest=bytes(32))
    assert scene.kinds[0] == "RolloverFailed"
    failed = scene.state.rollover
    metadata = dataclasses.replace(scene.state.resume_metadata, open=False)
    state, actions = scene.engine.resume(
        DEVICES, scene.state.strategy, scene.state.round, (), metadata, None, scene.roster, scene.roster_bytes
    )
    assert [type(a).__name__ for a in actions] == ["Gather"]
    assert (state.step, state.rollover.tries, state.rollover.folder) == (scene.state.step, failed.tries, "")
    for name in DEVICES:
        state, actions = scene.engine.handle(state, CameOnline(name))
    assert state.plan.step == scene.state.step + 1
    assert set(state.plan.assignments) != {first}
