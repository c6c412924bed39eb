"""IFCA through rollovers: whose models live on under which numbers, and what weight sharing does to restarts."""

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.epochs import Fleet, assert_same
from tests.helpers.plans import run_plan

D = 8
DEVICES = tuple(f"dev-{i}" for i in range(6))
RNG = np.random.default_rng(2)
CENTRES = np.array([3.0 * np.eye(D)[0], -3.0 * np.eye(D)[0]])
GOALS = {d: CENTRES[i % 2] + 0.05 * RNG.standard_normal(D) for i, d in enumerate(DEVICES)}
NEAR = [CENTRES[0] / 2, CENTRES[0] / 3]
SPLIT = [CENTRES[0] / 2 + 0.1, CENTRES[1] / 2 + 0.1]
PARTS = (SegmentSpec("cluster", 3), SegmentSpec("shared", D - 3))
FIRST_IS_BEST, SECOND_IS_BEST = [*SPLIT, *NEAR, *NEAR], [*NEAR, *SPLIT, *NEAR]


def ifca(origins, restart_rounds=2, **changes):
    restarts = len(origins) // 2
    settings = {"k": 2} | ({"restarts": restarts, "restart_rounds": restart_rounds} if restarts > 1 else {})
    run = run_plan("ifca", settings, origins=len(origins), **{"segments": (SegmentSpec("cluster", D),), **changes})
    return Fleet(run, DEVICES, GOALS, origins=[o.copy() for o in origins])


def test_once_a_start_is_kept_only_its_models_live_on_and_are_origins_0_and_1():
    rounds = ifca(SECOND_IS_BEST).run_to(8)
    kept = [rounds.theta(s) for s in rounds.state.slots]
    before = rounds.clusters
    assert sorted(rounds.rollover().models) == [2, 3]
    assert [s.origin for s in rounds.state.slots] == [0, 1]
    for theta, slot in zip(kept, rounds.state.slots, strict=True):
        np.testing.assert_allclose(rounds.theta(slot), theta, rtol=1e-6, atol=1e-6)
    rounds.step()
    assert {o.candidates for r, _, o in rounds.asked if r == 9} == {(0, 1)}
    assert rounds.clusters == before


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("origins", [FIRST_IS_BEST, SECOND_IS_BEST])
def test_every_start_keeps_its_numbers_while_restarts_are_under_way(origins, after):
    """What has not begun is where it was, the best finished start and the current one are where they had come."""
    rounds, without = ifca(origins).run_to(after), ifca(origins).run_to(8)
    best = [(s.origin, rounds.theta(s)) for s in rounds.state.best]
    assert sorted(rounds.rollover().models) == list(range(6))
    for i in range(2 * (after // 2 + 1), 6):
        np.testing.assert_allclose(rounds.origins[i], origins[i], rtol=1e-6)
    assert [(s.origin, s.version) for s in rounds.state.best] == [(i, after) for i, _ in best]
    for i, theta in best:
        np.testing.assert_allclose(rounds.origins[i], theta, rtol=1e-6, atol=1e-6)
    rounds.run_to(8)
    assert rounds.events[-1].detail["start"] == without.events[-1].detail["start"] == int(origins is SECOND_IS_BEST)
    assert_same(rounds, without)


def test_a_lost_start_is_at_its_origins_again():
    rounds = ifca(FIRST_IS_BEST).run_to(4)
    rounds.rollover()
    for i in (2, 3):
        np.testing.assert_allclose(rounds.origins[i], FIRST_IS_BEST[i], rtol=1e-6)


def test_the_shared_segment_is_folded_into_every_model():
    rounds = ifca(SPLIT, segments=PARTS).run_to(3)
    before = [rounds.theta(s, rounds.state.shared) for s in rounds.state.slots]
    inherited = rounds.rollover()
    assert inherited.shared is not None
    assert rounds.state.shared.origin == 0
    for j, (slot, theta) in enumerate(zip(rounds.state.slots, before, strict=True)):
        np.testing.assert_allclose(rounds.theta(slot, rounds.state.shared), theta, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(rounds.origins[j], theta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("origins", "after", "start", "finished"),
    [(SECOND_IS_BEST, 1, 0, False), (FIRST_IS_BEST, 3, 0, True), (SECOND_IS_BEST, 5, 1, True)],
)
def test_with_weight_sharing_a_rollover_ends_the_restarts(origins, after, start, finished):
    """The best finished start goes on, the one under way where none has finished; its models are what they were."""
    rounds = ifca(origins, segments=PARTS).run_to(after)
    state = rounds.state
    slots, shared = (state.best, state.best_shared) if finished else (state.slots, state.shared)
    before = [rounds.theta(s, shared) for s in slots]
    assert sorted(rounds.rollover().models) == [2 * start, 2 * start + 1]
    assert rounds.state.settled
    assert (rounds.state.best, rounds.state.best_choice, rounds.state.best_loss) == ((), {}, None)
    for slot, theta in zip(rounds.state.slots, before, strict=True):
        np.testing.assert_allclose(rounds.theta(slot, rounds.state.shared), theta, rtol=1e-6, atol=1e-6)
    told = len(rounds.events)
    rounds.reload()
    rounds.run_to(after + 4)
    (event,) = rounds.events[told:]
    assert (event.round, event.kind, event.detail) == (after, "restarts-ended", {"start": start, "finished": finished})
    assert {o.candidates for r, _, o in rounds.asked if r > after} == {(0, 1)}


def test_an_epoch_that_ends_in_the_middle_of_starts_that_share_weights_is_refused():
    with pytest.raises(ConfigError, match="changes after 5 rounds, in the middle of 3 starts of 2") as caught:
        ifca(FIRST_IS_BEST, segments=PARTS, epoch_rounds=5)
    assert "cover all starts" in caught.value.hint
    ifca(FIRST_IS_BEST, segments=PARTS, epoch_rounds=6)
    ifca(FIRST_IS_BEST, epoch_rounds=5)
    ifca(SPLIT, segments=PARTS, epoch_rounds=1)
