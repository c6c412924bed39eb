"""The parts that strategies share: cluster models, client updates, weights, draws and settings."""

import dataclasses

import numpy as np
import pytest

from aggregator.numerics.averaging import weighted_mean
from aggregator.strategies.base import (
    ClusterModel,
    RoundPlan,
    advanced,
    capped_devices,
    contribution_of,
    evaluates,
    final_assignment,
    in_order,
    mean_loss,
    mean_update,
    norm_of,
    of_one_round,
    read_settings,
    require,
    require_one_segment,
    train_assignment,
    weights_of,
)
from aggregator.strategies.cfl.state import CflSettings
from aggregator.strategies.ifca.state import IfcaSettings
from shoal.errors import ConfigError, IntegrityError, KeyMismatchError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase, Share
from tests.helpers.plans import D, contribution, engine_of, run_plan, upload_of

PARTS = (SegmentSpec("shared", 4), SegmentSpec("cluster", 2))


# --------------------------------------------------------------------------------------------------------- models


def test_moved_model_adds_its_offsets():
    """A model that moves adds its offsets and remembers its smallest mean."""
    delta = np.arange(D, dtype=np.float32)
    first = ClusterModel(origin=3, scale=0.5).moved(delta, 4, 7)
    assert (first.origin, first.contributors, first.version, first.scale, first.others) == (3, 4, 7, 0.5, ())
    np.testing.assert_array_equal(first.offset, delta)
    for contributors, fewest in ((9, 4), (2, 2)):
        second = first.moved(delta, contributors, 8)
        assert (second.contributors, second.version, second.origin, second.scale) == (fewest, 8, 3, 0.5)
        np.testing.assert_array_equal(second.offset, 2 * delta)
    np.testing.assert_array_equal(first.offset, delta, "the earlier model keeps its offset")


def test_norm_is_summed_in_float64():
    """A float32 sum of so many squares would stop to grow; the last coordinate is in a block of its own."""
    vector = np.ones((1 << 17) + 1, np.float32)
    vector[-1] = 1000.0
    assert norm_of(vector) == pytest.approx(np.sqrt((1 << 17) + 1e6), rel=1e-7)
    assert norm_of(np.zeros(0, np.float32)) == ClusterModel().norm == 0.0
    assert ClusterModel(offset=np.array([3, 4], np.float32)).norm == 5.0
    assert norm_of(np.full(3, 3e38, np.float32)) == np.inf, "and no warning is raised"


def test_figures_of_an_upload_are_kept():
    """Every figure of an upload is in its client update."""
    engine = engine_of(run_plan())
    state, _ = engine.begin(("dev-1",))
    state = dataclasses.replace(
        state, round=4, plan=RoundPlan(4, {2: ClusterModel()}, {"dev-1": train_assignment((2,), evaluate=True)})
    )
    upload, _ = upload_of(engine, state, "dev-1", margins=(0.0, 0.5), model_norm=1.5, samples=11, loss=0.25)
    update = contribution_of(upload, None, attached=b"more")
    assert update.key == (4, int(Phase.TRAIN), "dev-1")
    for name in ("model", "samples", "loss", "key_id", "margins", "correct", "tested", "model_norm"):
        assert getattr(update, name) == getattr(upload, name), name
    assert (update.attached, update.norm, update.vector) == (b"more", 0.0, None)
    vector = np.array([3, 4, 0, 0, 0, 0], np.float32)
    assert contribution_of(upload, vector).norm == 5.0
    assert contribution_of(upload, vector, norm=7.0).norm == 7.0


# -------------------------------------------------------------------------------------------------------- updates


def test_missing_row_names_device_and_round():
    """The row of an update without a vector is refused by device and round."""
    update = contribution("dev-1", round=3)
    with pytest.raises(IntegrityError, match=r"^dev-1 uploaded no update in round 3$"):
        _ = update.row


def test_update_counts_once_under_one_key():
    """An update counts once and only under the key of the others."""
    first, other = contribution("dev-1", np.ones(D)), contribution("dev-2", np.ones(D))
    assert of_one_round([other, first]) == [first, other]
    with pytest.raises(IntegrityError, match="before"):
        of_one_round([first, other, first])
    with pytest.raises(KeyMismatchError):
        of_one_round([first, contribution("dev-3", np.ones(D), key_id=b"o" * 16)])


@pytest.mark.parametrize("scored_first", [True, False])
def test_any_key_without_a_vector(scored_first):
    """A device without a vector may name any key."""
    other = contribution("dev-2", np.ones(D), key_id=b"o" * 16)
    given = [contribution("dev-3" if scored_first else "dev-1", np.ones(D)), dataclasses.replace(other, vector=None)]
    assert len(of_one_round(given)) == 2
    with pytest.raises(KeyMismatchError, match=r"^dev-4 masked its update under another key$"):
        of_one_round([*given, contribution("dev-4", np.ones(D), key_id=b"o" * 16)])


def test_updates_are_summed_in_order():
    """Their order of arrival would change the last bits of a mean."""
    updates = [contribution(d, np.full(D, v)) for d, v in (("c", 1e8), ("a", 1.0), ("b", -1e8))]
    assert [c.device for c in in_order(updates)] == ["a", "b", "c"]
    assert [c.device for c in in_order(reversed(updates))] == ["a", "b", "c"]


# -------------------------------------------------------------------------------------------------------- weights


def given():
    honest = [contribution(f"dev-{i}", [1.0] * 6, samples=10, loss=1.0) for i in range(4)]
    return [*honest, contribution("liar", [-1.0] * 6, samples=100_000, loss=0.0)]


def test_mean_follows_the_cluster():
    """The mean follows the cluster and not the one with most samples."""
    assert mean_update(given(), "samples", 0.0)[0] < -0.99
    assert mean_update(given(), "samples", 3.0)[0] == pytest.approx((4 - 3) / 7)


def test_capped_devices_are_named():
    """With their weight; uniform weights are never capped."""
    assert weights_of(given(), "uniform", 3.0).tolist() == [1.0] * 5
    capped = [capped_devices([given()], *rule) for rule in (("uniform", 3.0), ("samples", 3.0), ("samples", 0.0))]
    assert capped == [{}, {"liar": 30.0}, {}]


def test_reported_loss_is_a_capped_mean_too():
    assert mean_loss(given()[1:], run_plan()) == pytest.approx(3 / 6)
    assert mean_loss(given()[1:], run_plan(weight_cap=0.0)) < 0.001
    assert mean_loss([], run_plan()) is None
    assert mean_loss([contribution("a", loss=1.0, samples=0)], run_plan()) is None
    even = [contribution("a", loss=1.0, samples=1), contribution("b", loss=3.0, samples=1)]
    assert mean_loss(even, run_plan()) == 2.0


@pytest.mark.parametrize("lie", [-3.4e38, 0.0, 3.4e38])
def test_one_false_loss_of_five(lie):
    """One false loss of five counts as another of them."""
    devices = [contribution(f"dev-{i}", samples=10, loss=1.0 + 0.1 * i) for i in range(4)]
    found = mean_loss([*devices, contribution("liar", samples=100_000, loss=lie)], run_plan())
    assert 1.0 < found < 1.3


def test_enough_devices_move_a_model():
    """A model moves only by the mean of enough devices."""
    run, slot = run_plan(min_contributors=3, weight_cap=0.0), ClusterModel()
    updates = [contribution(f"dev-{i}", np.full(D, i), samples=10 * i) for i in range(1, 4)]
    assert advanced(slot, updates[:2], run, mean_update, 5) is slot
    assert advanced(slot, [], run_plan(min_contributors=1), None, 5) is slot, "no mean is made of nothing"
    moved = advanced(slot, updates, run, mean_update, 5)
    assert (moved.contributors, moved.version) == (3, 5)
    np.testing.assert_array_equal(moved.offset, weighted_mean([c.row for c in updates], np.array([10.0, 20, 30])))


def test_training_reports_no_margins():
    """A training assignment trains and reports no margins."""
    made = train_assignment((4, 7), evaluate=True, phase=Phase.PRETRAIN)
    assert (made.candidates, made.phase, made.share) == ((4, 7), Phase.PRETRAIN, Share.TRAIN)
    assert (made.train, made.evaluate, made.margins) == (True, True, False)
    assert train_assignment((4,), evaluate=False).phase == Phase.TRAIN
    made = final_assignment((4, 7))
    assert (made.candidates, made.phase, made.share) == ((4, 7), Phase.SCORE, Share.TRAIN)
    assert (made.train, made.evaluate, made.margins) == (False, True, False), "the final one trains nothing either"


@pytest.mark.parametrize(("every", "rounds"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_rounds_that_report_accuracy(every, rounds):
    """Rounds in which devices report accuracy."""
    assert [r for r in range(1, 7) if evaluates(run_plan(evaluate_every=every), r)] == rounds


# -------------------------------------------------------------------------------------------------------- settings


def test_settings_are_read_by_type():
    """Settings are read by their types and the rest are defaults."""
    given = {"eps1": "0.25", "min_side": "4", "path": "ON", "validate": "false", "linkage": "complete"}
    found = read_settings(CflSettings, "cfl", given)
    assert found == CflSettings(eps1=0.25, min_side=4, path=True, validate=False, linkage="complete")


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"speed": "3"}, "ifca has no setting 'speed'", "it has k, normalise, option, probe_every, "),
        (
            {"k": "2.5"},
            "setting k is a whole number or auto, not '2.5'",
            "`shoal-fleet run start --help-all` says what each takes",
        ),
        ({"k": "0"}, "k is at least 1, or auto", "with k=auto the strategy finds it"),
        ({"restarts": "0"}, "k, restarts and restart_rounds are at least 1", "leave out --set to take the defaults"),
    ],
)
def test_unfit_settings_are_refused_by_name(given, message, hint):
    """Settings that do not fit are refused by name."""
    with pytest.raises(ConfigError) as caught:
        read_settings(IfcaSettings, "ifca", given)
    assert str(caught.value) == message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_a_switch_is_on_or_off(text):
    with pytest.raises(ConfigError, match=f"^setting path is on or off, not '{text}'$"):
        read_settings(CflSettings, "cfl", {"path": text})


def test_false_condition_has_a_hint():
    """A condition that does not hold is an error with its hint."""
    require(True, "never")
    with pytest.raises(ConfigError, match=r"^too few$") as caught:
        require(False, "too few", "take more")
    assert caught.value.hint == "take more"


def test_a_shared_segment_is_refused():
    require_one_segment(run_plan())
    with pytest.raises(ConfigError, match=r"^fedavg has no shared segment$"):
        require_one_segment(run_plan(segments=PARTS))
