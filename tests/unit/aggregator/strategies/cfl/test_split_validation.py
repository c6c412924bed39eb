"""Validated splits: a candidate is put on trial, and its devices decide."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import combine_pvalues, t, ttest_1samp, ttest_ind

from aggregator.strategies.base import Event
from aggregator.strategies.cfl.split_validation import (
    Verdict,
    combined_p_value,
    contradictions,
    goes_on,
    judge,
    judge_both,
    paired_t_p_value,
    refusal,
)
from aggregator.strategies.cfl.state import CflSettings
from aggregator.strategies.cfl.strategy import MAX_EXTENSIONS
from shoal.protocol.messages import Phase, Share
from tests.helpers.plans import contribution
from tests.unit.aggregator.strategies.cfl.quadratics import (
    DEVICES,
    GROUP_OF,
    GROUPS,
    TRIED,
    D,
    Quadratic,
    Telling,
    cfl,
    partition,
    ran,
)


def test_trial_trains_then_asks_for_margins():
    """Two rounds of training under the phase TRIAL, then one of scoring the own half's model first, the control second."""
    rounds, answer = ran(5, **TRIED)
    opened = next(e for e in rounds.events if e.kind == "trial-opened")
    phases = {r: {o.phase for r_, _, o in answer.assignments if r_ == r} for r in range(1, 6)}
    assert opened.round == 2
    assert phases == {1: {Phase.TRAIN}, 2: {Phase.TRAIN}, 3: {Phase.TRIAL}, 4: {Phase.TRIAL}, 5: {Phase.ADAPT}}
    scoring = {d: o for r, d, o in answer.assignments if r == 5}
    assert {o.candidates for o in scoring.values()} == {(1, 0), (2, 0)}
    assert all(scoring[d].candidates[0] == 1 for d in GROUPS["a"]) or all(
        scoring[d].candidates[0] == 2 for d in GROUPS["a"]
    )
    assert all(o.train and o.margins for o in scoring.values())
    training = {o.candidates for r, _, o in answer.assignments if r in (3, 4)}
    assert training == {(1, 0), (2, 0)}, "devices hold the control, but train their half's model"


def test_control_goes_on_as_the_parent_would():
    """Its step is the mean of all updates of the trial: in the first round they start from the same model."""
    rounds, alone = (ran(3, **settings)[0] for settings in (TRIED, {**TRIED, "warm_up": 100}))
    assert rounds.state.trials
    np.testing.assert_allclose(
        rounds.theta(rounds.state.clusters[0].slot), alone.theta(alone.state.clusters[0].slot), atol=1e-5
    )


class Indifferent(Quadratic):
    """Scores say that the control is just as good."""

    def loss(self, _device, _model):
        return 1.0


def test_refused_trial_keeps_its_training():
    """A refused trial keeps what was trained and leaves the cluster in peace."""
    rounds, answer = ran(2, Indifferent, **TRIED)
    before = rounds.state.clusters[0].slot
    rounds.go(answer, 3)
    assert [e.kind for e in rounds.events] == ["trial-opened", "split-refused"]
    assert (before.version, rounds.state.clusters[0].slot.version) == (2, 5)
    assert not rounds.state.trials
    assert not rounds.state.tree
    rounds.go(answer, 5)
    opened = [e.round for e in rounds.events if e.kind == "trial-opened"]
    assert opened == [2, 9], "refused in round 5, then three rounds of peace: 6, 7 and 8"
    detail = rounds.events[1].detail
    assert (detail["prefer"], detail["margin"]) == ([0.0, 0.0], [0.0, 0.0])
    assert detail["reason"].startswith("0% of one half's")


class LoneGains(Telling):
    """The half that is one group gains by the split, and the other loses."""

    def told(self, device, _margins, _round):
        (trial,) = self.rounds.state.trials.values()
        (half,) = (h for h in (trial.left, trial.right) if device in h.members)
        return (0.2 if len({name[0] for name in half.members}) == 1 else -0.05,) * 2


@pytest.mark.parametrize("size", [4, 5])
def test_one_group_may_leave_alone(size):
    """Five devices of one direction leave the rest, which goes on with the control; of fewer, one liar could."""
    far = {"a": 4.0 * np.eye(D)[0], "b": 8.0 * np.eye(D)[1], "c": -8.0 * np.eye(D)[1]}
    goals = {f"{group}-{i}": far[group] + 0.1 * np.eye(D)[5 + i] for group in far for i in range(size)}
    rounds = cfl(tuple(sorted(goals)), **TRIED)
    answer = LoneGains(rounds, goals)
    rounds.go(answer, 4)
    control = rounds.state.clusters[0].slot
    rounds.step(answer)
    assert [e.kind for e in rounds.events] == ["trial-opened", "split" if size == 5 else "split-refused"]
    if size == 5:
        left, rest = sorted(rounds.state.clusters.values(), key=lambda c: len(c.members))
        assert len({name[0] for name in left.members}) == 1
        assert rest.slot.version == control.version + 1, "the control, moved by the mean of all in the last round"


class SlowGain(Telling):
    """Halves gain nothing at first, and more at each look: the evidence is weak, then clear."""

    def told(self, device, _margins, round_):
        spread = 0.05 * (1 + DEVICES.index(device) % 3)
        return (0.0, round(spread + 0.004 * round_ - 0.02, 4))


def test_clear_cut_gets_time(monkeypatch):
    """A clear cut on trial gets time while the evidence is weak."""
    monkeypatch.setattr(CflSettings, "convinces", lambda _self, _sides, tried: tried >= 3)
    rounds, _ = ran(30, SlowGain, **TRIED)
    first = next(e for e in rounds.events if e.kind == "split")
    assert rounds.events[0].kind == "trial-opened"
    assert "split-refused" not in [e.kind for e in rounds.events if e.round < first.round]
    assert first.round == rounds.events[0].round + 3 + 3 * 6, (
        "four looks, each after two rounds of training and the one to compare, and as many of the control before all but one"
    )


def test_extensions_are_bounded(monkeypatch):
    monkeypatch.setattr(CflSettings, "convinces", lambda *_: False)
    rounds, _ = ran(6 * (MAX_EXTENSIONS + 1), SlowGain, **TRIED)
    opened, refused = (next(e.round for e in rounds.events if e.kind == k) for k in ("trial-opened", "split-refused"))
    assert refused == opened + 3 + 6 * MAX_EXTENSIONS


def test_control_of_a_trial_trains_by_itself(monkeypatch):
    """It has learned what the cluster would have learned alone, in every second half of the rounds since the first look."""
    monkeypatch.setattr(CflSettings, "convinces", lambda *_: False)
    rounds, alone = cfl(**TRIED), cfl(**{**TRIED, "warm_up": 1000})
    answer, lone = SlowGain(rounds), Quadratic(alone)
    rounds.go(answer, 5)
    (trial,) = rounds.state.trials.values()
    halves = (trial.left.slot, trial.right.slot)
    rounds.go(answer, 3)
    (trial,) = rounds.state.trials.values()
    assert (trial.left.slot, trial.right.slot) == halves
    assert {o.candidates[0] for r, _, o in answer.assignments if r >= 6} == {0}
    alone.go(lone, 8)
    ours, theirs = (fleet.theta(fleet.state.clusters[0].slot) for fleet in (rounds, alone))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    rounds.go(answer, 3)
    (trial,) = rounds.state.trials.values()
    assert (trial.left.slot.version, rounds.state.clusters[0].slot.version) == (11, 8), "the rounds of their last means"


def test_no_trial_without_rounds_left():
    """No trial opens that the run has no rounds left to judge."""
    for count, kinds in ((4, []), (5, ["trial-opened", "split"])):
        rounds, _ = ran(count, changes={"rounds": count}, **TRIED)
        assert [e.kind for e in rounds.events] == kinds


def test_unfinished_trial_takes_the_better(monkeypatch):
    """Devices on trial at the end take the better model by their validation share."""
    monkeypatch.setattr(CflSettings, "convinces", lambda *_: False)
    rounds, _ = ran(12, SlowGain, **TRIED)
    (trial,) = rounds.state.trials.values()
    final = rounds.strategy.final(rounds.state, 13, (*DEVICES, "dev-new"))
    for half in (trial.left, trial.right):
        for device in half.members:
            assert final.assignments[device].candidates == (0, half.model)
            assert final.assignments[device].share == Share.VALIDATION
    assert final.assignments["dev-new"].candidates == (0,)
    assert set(final.models) == {0, trial.left.model, trial.right.model}


def test_a_cut_without_a_gap_gets_one_look(monkeypatch):
    monkeypatch.setattr(CflSettings, "convinces", lambda *_: False)
    monkeypatch.setattr("aggregator.strategies.cfl.strategy.has_gap", lambda _figures: False)
    rounds, _ = ran(5, SlowGain, **TRIED)
    assert [e.kind for e in rounds.events] == ["trial-opened", "split-refused"]


@pytest.mark.parametrize(
    ("p_values", "expected"), [((0.2, 0.05), True), ((0.5, 0.5), False), ((0.001, 0.95), False), ((0.0001, 0.85), True)]
)
def test_weak_evidence_gets_another_look(p_values, expected):
    """Weak evidence that no side speaks against is worth another look."""
    assert goes_on([Verdict(4, 1.0, 0.1, p, p) for p in p_values]) is expected


class OneSided(Telling):
    """Only one half gains by the split: for the others their model is no better."""

    def told(self, device, margins, _round):
        return (0.0, -0.2) if GROUP_OF[device] == "a" else margins


def test_both_sides_must_prefer_a_split():
    """A split stands only if both sides prefer it."""
    rounds, _ = ran(5, OneSided, **TRIED)
    assert rounds.events[-1].kind == "split-refused"
    assert sorted(rounds.events[-1].detail["prefer"]) == [0.0, 1.0]


@pytest.mark.parametrize(("sign", "ends"), [(1, "split"), (-1, "split-refused")], ids=["likely", "against"])
def test_labels_in_balance_may_decide(sign, ends):
    """A small gain that is clear with each label of equal weight makes a split, unless the margin is against it."""
    small = np.array([0.004, 0.03, 0.012, 0.02])

    class ByLabels(Telling):
        def told(self, device, _margins, _round):
            gain = float(small[DEVICES.index(device) % len(small)])
            return (0.0, sign * gain, 0.05 + gain)

    rounds, _ = ran(5, ByLabels, **{**TRIED, "margin": 0.1, "p_value": 0.001})
    assert rounds.events[1].kind == ends


def test_trial_gives_up_on_the_absent():
    """A half that can't be averaged makes the trial wait; after six lost rounds the parent goes on."""
    rounds, answer = ran(2, **TRIED)
    others = [d for d in DEVICES if GROUP_OF[d] != "a"]
    for lost in range(1, 6):
        rounds.step(answer, present=others)
        (trial,) = rounds.state.trials.values()
        assert (trial.waited, trial.trained) == (lost, 0)
    rounds.step(answer, present=others)
    assert rounds.events[-1].kind == "split-refused"
    assert rounds.events[-1].detail["reason"].endswith("it is tried again when they do")


def test_trial_goes_on_when_they_return():
    """A trial goes on when its devices come back."""
    rounds, answer = ran(2, **TRIED)
    rounds.step(answer, present=[d for d in DEVICES if GROUP_OF[d] != "a"])
    rounds.go(answer, 3)
    assert rounds.events[-1].kind == "split"


@pytest.mark.parametrize("seed", range(8))
def test_paired_t_test_is_scipys(seed):
    """The paired t test of a small side is scipys."""
    rng = np.random.default_rng(seed)
    values = rng.normal(rng.uniform(-0.5, 0.5), 1.0, rng.integers(2, 5))
    expected = ttest_1samp(values, 0.0, alternative="greater").pvalue
    assert paired_t_p_value(values) == pytest.approx(expected, rel=1e-12)


def test_unlike_gains_use_both_spreads():
    """Alone they would need gains that are nearly equal, however large these are."""
    three, two = [0.38, 0.42, 0.43], [0.7, 1.16]
    assert judge(two).p_value > 0.07
    assert max(judge(three, two).shared, judge(two, three).shared) < 0.03
    assert judge([0.01, -0.02, 0.4], [0.5, 0.6]).shared > 0.1
    assert judge([-0.2, -0.3], [0.5, 0.6]).shared > 0.9


@pytest.mark.parametrize("seed", range(8))
def test_small_sides_have_a_pooled_spread(seed):
    """The spread of two small sides is pooled as in an analysis of variance."""
    rng = np.random.default_rng(seed)
    own, other = rng.normal(0.4, 1.0, 3), rng.normal(-2.0, 1.0, 4)
    spread = np.sqrt((own.var() * 3 + other.var() * 4) / 5)
    pooled = t.sf(own.mean() / (spread / np.sqrt(3)), 5)
    assert judge(own, other).shared == pytest.approx(min(pooled, judge(own).p_value), rel=1e-10)


@pytest.mark.parametrize("lie", [-5.0, 5.0, 0.1])
def test_liar_in_a_large_side(lie):
    """A liar in a large side spoils no small one."""
    three, nine = [0.21, 0.24, 0.3], [0.2, 0.22, 0.25, 0.21, 0.3, 0.27, 0.24, 0.19, lie]
    assert judge(three, nine).shared <= judge(three).p_value < 0.01


@pytest.mark.parametrize("seed", range(8))
def test_lesser_p_value_counts_from_five(seed):
    """Yuen's is scipy's against as many zeros, which add no variance and no degree of freedom."""
    rng = np.random.default_rng(seed)
    values = rng.normal(rng.uniform(-0.5, 0.5), 1.0, rng.integers(5, 30))
    zeros, trim = np.zeros(len(values)), 1.5 / len(values)
    yuen = ttest_ind(values, zeros, trim=trim, equal_var=False, alternative="greater").pvalue
    student = ttest_1samp(values, 0.0, alternative="greater").pvalue
    assert paired_t_p_value(values) == pytest.approx(min(yuen, student), rel=1e-10)


def side(margins, samples):
    """Return the uploads of devices that report these margins."""
    pairs = zip(margins, samples, strict=True)
    return [contribution(f"dev-{i}", samples=count, margins=(0.0, m)) for i, (m, count) in enumerate(pairs)]


def test_few_samples_have_less_say():
    """The margins of a few samples are noise, in which the gain of the others would drown."""
    margins, few, many = [0.3, -0.4, 0.05, 0.06, 0.04, 0.07, -0.3, 0.05], 4, 400
    verdict = judge_both([side(margins, [few, few, many, many, many, many, few, many])] * 2, 1)[0]
    assert (verdict.p_value < 0.02, judge(margins).p_value > 0.4) == (True, True)
    assert verdict.prefer > 0.98
    assert verdict.margin == pytest.approx(0.054, abs=2e-3)


@pytest.mark.parametrize("count", [1, 100])
def test_equal_counts_have_a_vote_each(count):
    margins = [[0.1, 0.2, 0.05], [0.3, -0.1, 0.2, 0.15, 0.1]]
    equal = judge_both([side(m, [count] * len(m)) for m in margins], 1)
    for found, expected in zip(equal, [judge(*margins), judge(*margins[::-1])], strict=True):
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), rel=1e-12)


def test_more_samples_have_no_more_say():
    honest, boasting = [20, 30, 40, 40, 40], [20, 30, 40, 40, 10**9]
    margins = [0.1, 0.02, -0.2, 0.3, 0.05]
    found = [judge_both([side(margins, samples)] * 2, 1) for samples in (honest, boasting)]
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [4, 5, 12])
def test_noise_gains_nothing_by_says(size):
    rng = np.random.default_rng(size)
    samples = np.geomspace(4, 400, size).round()
    passed = [
        [judge(m).p_value < 0.1, judge(m, says=np.minimum(1, samples / np.median(samples))).p_value < 0.1]
        for m in rng.normal(size=(1000, size)) / np.sqrt(samples)
    ]
    equal, by_say = np.mean(passed, axis=0)
    assert by_say < equal + 0.02 < 0.2


LIES = (-5.0, 5.0, 0.0, 1e-4, -1e-4, None)
"""What a device reports; None: the margin of the device before it."""


def lied(margins, place, lie):
    told = margins.copy()
    told[place] = margins[place - 1] if lie is None else lie
    return told


@pytest.mark.parametrize("count", range(5, 13))
def test_one_false_margin_of_five(count):
    """Sides that gain by their half's model say so whoever lies, and those that lose by it never do."""
    for seed in range(20, 40):
        rng = np.random.default_rng(seed)
        margins, says = rng.uniform(0.06, 0.12, count), rng.uniform(0.3, 1.0, count)
        for place in (0, count // 2, count - 1):
            says[place] = 1.0
            for lie in LIES:
                gain, loss = (judge(lied(m, place, lie), says=says) for m in (margins, -margins))
                assert gain.prefer > 0.75
                assert gain.p_value < 0.05
                assert margins.min() * 0.6 < gain.margin < margins.max()
                assert loss.prefer < 0.5
                assert loss.p_value > 0.15, "an outlier alone has a t of 1 at most, whatever its size"


@pytest.mark.parametrize("count", [3, 4])
def test_of_three_or_four_one_liar_decides(count):
    margins = np.full(count, 0.1) + 0.01 * np.arange(count)
    assert judge(margins).p_value < 0.01
    assert judge(lied(margins, 0, -5.0)).p_value > 0.5


@pytest.mark.parametrize("lie", [-5.0, 5.0, 0.0, None])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_one_liar_changes_no_split(place, lie):
    """A fleet with one liar splits as an honest one."""
    devices = tuple(f"dev-{i:02d}" for i in range(12))
    goals = {d: (4.0 + 0.1 * (i % 6)) * np.eye(24)[i // 6] for i, d in enumerate(devices)}

    class Liar(Telling):
        def told(self, device, margins, _round):
            return margins if device != devices[place] or lie is None else (0.0, lie)

    rounds = cfl(devices, **{**TRIED, "margin": 0.1, "p_value": 0.001})
    rounds.go(Liar(rounds, goals), 5)
    assert partition(rounds) == {frozenset(devices[:6]), frozenset(devices[6:])}
    named = [e.detail for e in rounds.events if e.kind == "stands-apart"]
    if lie != -5.0:
        assert named == []
        return
    (told,) = named
    assert (told["device"], told["margin"]) == (devices[place], -5.0)
    assert told["others"] > 0


@pytest.mark.parametrize(
    ("margins", "named"),
    [
        ([0.1, 0.2, -0.3], [2]),
        ([-0.1, -0.2, 0.3, -0.1], [2]),
        ([0.1, -0.2, -0.3, 0.2, 0.1], []),
        ([0.1, 0.2, 0.0], []),
        ([0.1, 0.0, -0.2], []),
        ([0.1, -0.2], []),
        ([0.1, 0.2, 5.0], []),
        ([0.1, 0.2, -0.2], []),
    ],
)
def test_contradicting_device_is_named(margins, named):
    """The device whose margin contradicts all others is named."""
    given = [contribution(f"dev-{i}", margins=(0.0, m)) for i, m in enumerate(margins)]
    events = contradictions(given, 7, 4, 0.25)
    assert [(e.round, e.kind, e.detail["cluster"], e.detail["device"]) for e in events] == [
        (4, "stands-apart", 7, f"dev-{i}") for i in named
    ]


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ([], 1.0, 1.0),
        ([3.0], 1.0, 1.0),
        ([0.0, 0.0], 0.499, 0.501),
        ([-1.0, -1.0], 0.999, 1.0),
        ([0.0031, 0.0031], 0.005, 0.05),
        # With both ends left out only one large gain of three would be left: two targets out of five are easy to predict.
        ([0.09, 0.13, 0.13, 0.58, 0.84], 0.0, 0.05),
        ([-0.3, 1e-4, 1e-4, 1e-4, 0.2], 0.1, 1.0),
    ],
    ids=[
        "none",
        "one",
        "zeros",
        "losses",
        "two equal as rounded",
        "honest unlike gains",
        "inner ones equal as rounded",
    ],
)
def test_p_value_of_few_or_equal_values(values, least, most):
    assert least <= paired_t_p_value(np.array(values)) <= most


@pytest.mark.parametrize("pair", [(0.02, 0.02), (1e-5, 0.09), (1.0, 1.0), (0.3, 1e-12)])
def test_the_combined_p_value_is_scipys(pair):
    assert combined_p_value(pair) == pytest.approx(combine_pvalues(pair, "fisher").pvalue, rel=1e-9)


def test_p_value_of_zero_combines():
    """A p value of zero or a single one combines."""
    assert (combined_p_value((0.0, 0.05)), combined_p_value((0.3,))) == (0.0, 0.3)


CONTRARY = Event(4, "stands-apart", {"device": "dev-3", "margin": -5.0, "others": 0.1})


@pytest.mark.parametrize(
    ("sides", "apart", "words"),
    [
        (
            (Verdict(3, 0.67, 0.1, 0.6), Verdict(9, 1.0, 0.1, 0.01)),
            ((CONTRARY,), ()),
            "dev-3 contradicts all others of its half",
        ),
        (
            (Verdict(9, 0.4, -0.01, 0.6), Verdict(5, 1.0, 0.1, 0.01)),
            ((CONTRARY,), ()),
            "40% of one half's 9 devices, by their say, do better",
        ),
        (
            (Verdict(3, 1.0, 0.04, 0.2), Verdict(2, 1.0, 0.03, 0.2)),
            ((), ()),
            "gains of 0.04 and 0.03 in loss may be chance among 3 and 2",
        ),
        (
            (Verdict(9, 0.8, 0.004, 0.2), Verdict(7, 0.8, 0.03, 0.01)),
            ((), ()),
            "may be chance: more validation samples would decide",
        ),
    ],
)
def test_refusal_says_why(sides, apart, words):
    """A refusal says why in one sentence and what would decide."""
    told = refusal(sides, apart, 0.5, 0.1)
    assert words in told
    assert len(told) < 200
    assert told.count(":") == 1


def test_the_verdict_of_one_side():
    verdict = judge([0.5, -0.1, 0.3, 0.3])
    assert (verdict.devices, verdict.prefer, verdict.margin) == (4, 0.75, pytest.approx(0.25))
    assert judge([]).prefer == 0.0
