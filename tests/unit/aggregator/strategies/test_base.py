"""The parts that strategies share: cluster models, client updates, weights, draws and settings."""

import dataclasses

import numpy as np
import pytest

from aggregator.numerics.averaging import weighted_mean
from aggregator.strategies.base import (
    ClusterModel,
    advanced,
    evaluates,
    mean_loss,
    mean_update,
    norm_of,
    of_one_round,
    read_settings,
    require,
    require_one_origin,
)
from aggregator.strategies.cfl.state import CflSettings
from aggregator.strategies.ifca.state import IfcaSettings
from shoal.errors import ConfigError, IntegrityError, KeyMismatchError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.plans import D, contribution, run_plan

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
    assert norm_of(np.zeros(0, np.float32)) == 0.0


def test_norm_beyond_float32_is_infinite():
    """A norm beyond float32 is infinite and raises no warning."""
    assert norm_of(np.full(3, 3e38, np.float32)) == np.inf


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
    with pytest.raises(IntegrityError):
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


# -------------------------------------------------------------------------------------------------------- weights


def given():
    honest = [contribution(f"dev-{i}", [1.0] * 6, samples=10, loss=1.0) for i in range(4)]
    return [*honest, contribution("liar", [-1.0] * 6, samples=100_000, loss=0.0)]


def test_reported_loss_is_a_capped_mean_too():
    assert mean_loss(given()[1:], run_plan()) == pytest.approx(3 / 6)
    assert mean_loss(given()[1:], run_plan(weight_cap=0.0)) < 0.001
    assert mean_loss([], run_plan()) is None


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
    moved = advanced(slot, updates, run, mean_update, 5)
    assert (moved.contributors, moved.version) == (3, 5)
    np.testing.assert_array_equal(moved.offset, weighted_mean([c.row for c in updates], np.array([10.0, 20, 30])))


def test_no_mean_is_made_of_no_updates():
    slot = ClusterModel()

    def mean(*_):
        raise AssertionError("a mean of nothing")

    assert advanced(slot, [], run_plan(min_contributors=1), mean, 5) is slot


# ---------------------------------------------------------------------------------------------------------- draws


# ---------------------------------------------------------------------------------------------------- assignments


@pytest.mark.parametrize(("every", "rounds"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_rounds_that_report_accuracy(every, rounds):
    """Rounds in which devices report accuracy."""
    assert [r for r in range(1, 7) if evaluates(run_plan(evaluate_every=every), r)] == rounds


# -------------------------------------------------------------------------------------------------------- settings


def test_settings_are_read_by_type():
    """Settings are read by their types and the rest are defaults."""
    given = {"eps1": "0.25", "min_side": "4", "path": "ON", "validate": "false", "linkage": "complete"}
    found = read_settings(CflSettings, "cfl", given)
    expected = CflSettings(eps1=0.25, min_side=4, path=True, validate=False, linkage="complete")
    assert found == expected


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


def test_one_origin_refuses_several():
    """A strategy of one origin refuses several and a shared segment."""
    require_one_origin(run_plan())
    with pytest.raises(ConfigError, match=r"^fedavg starts from one origin, the run ships 2$"):
        require_one_origin(run_plan(origins=2))
    with pytest.raises(ConfigError, match=r"^fedavg has no shared segment$"):
        require_one_origin(run_plan(segments=PARTS))
