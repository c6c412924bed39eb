"""CFL's settings: their ranges, their defaults with and without validation, and the verdicts that convince."""

import pytest

from aggregator.strategies.cfl.split_validation import Verdict
from aggregator.strategies.cfl.state import CflSettings
from shoal.errors import ConfigError
from shoal.protocol.documents import Capabilities
from tests.unit.aggregator.strategies.cfl.quadratics import cfl


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linkage": "ward"}, "linkage 'ward' is none of single, complete, average"),
        ({"form": "other"}, "form 'other' is neither relative nor absolute"),
        ({"eps1": 0.0}, "eps1 is positive and eps2 not negative"),
        ({"eps2": -1.0}, "eps1 is positive and eps2 not negative"),
        ({"gamma_max": 1.0}, "gamma_max lies in [0, 1)"),
        ({"gamma_max": -0.1}, "gamma_max lies in [0, 1)"),
        ({"trial_rounds": 0}, "trial_rounds is at least 1"),
        ({"min_side": 0}, "min_side is -1 for the default, or at least 1"),
        ({"prefer": 1.0}, "prefer and p_value are shares"),
        ({"p_value": 0.0}, "prefer and p_value are shares"),
        ({"p_value": 1.1}, "prefer and p_value are shares"),
        ({"max_age": 0}, "max_age and patience are at least 1"),
        ({"patience": 0}, "max_age and patience are at least 1"),
        ({"merge_every": -2}, "merge_every is -1 for the default, 0 for never, or at least 2"),
        ({"merge_every": 1}, "merge_every is -1 for the default, 0 for never, or at least 2"),
        ({"look_every": -2}, "look_every is -1 for the default, 0 for never, or at least 2"),
        ({"look_every": 1}, "look_every is -1 for the default, 0 for never, or at least 2"),
        ({"merge_p_value": 0.0}, "merge_p_value is a share"),
    ],
)
def test_value_out_of_range_is_named(settings, message):
    """A value out of range is refused by name."""
    with pytest.raises(ConfigError) as caught:
        CflSettings(**settings).check()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "settings",
    [{}, {"gamma_max": 0.99}, {"prefer": 0.0, "p_value": 1.0}, {"merge_every": 2, "look_every": 0}, {"eps2": 0.0}],
)
def test_ends_of_the_range_are_allowed(settings):
    """Values at the edge of their range are allowed."""
    CflSettings(**settings).check()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"eps1": 0}, "eps1"),
        ({"validate": "maybe"}, "^setting validate is on or off, not 'maybe'$"),
        ({"speed": 3}, "no setting 'speed'"),
    ],
)
def test_senseless_settings_are_refused(settings, match):
    """A run with settings that make no sense is refused."""
    with pytest.raises(ConfigError, match=match):
        cfl(**settings)


@pytest.mark.parametrize(
    ("settings", "check_every", "look_rounds"),
    [
        ({}, 20, 20),
        ({"validate": False}, 0, 0),
        ({"merge_every": 0, "look_every": 0}, 0, 0),
        ({"merge_every": 7, "look_every": 9}, 7, 9),
        ({"validate": False, "merge_every": 7, "look_every": 9}, 7, 9),
    ],
)
def test_defaults_of_checks_and_moves(settings, check_every, look_rounds):
    """Splits are checked and moves offered every twenty rounds unless alg 5 stands alone."""
    made = CflSettings(**settings)
    assert (made.check_every, made.look_rounds) == (check_every, look_rounds)


@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        ({}, True),
        ({"validate": False}, False),
        ({"validate": False, "merge_every": 5}, True),
        ({"merge_every": 0}, True),
    ],
)
def test_trials_need_a_validation_share(settings, uses):
    """Devices need a validation share for trials and for checks."""
    made = CflSettings(**settings)
    assert made.uses_validation is uses
    assert made.capabilities == Capabilities(margins=uses, compare=True)


def test_only_paths_are_asked_for():
    """Only a run with paths asks devices to keep them."""
    assert CflSettings(path=True).capabilities.keep_path
    assert not CflSettings().capabilities.keep_path


@pytest.mark.parametrize(
    ("sides", "convinces"),
    [
        ((Verdict(8, 0.6, 0.02, 0.01), Verdict(8, 0.9, 0.02, 0.005)), True),
        ((Verdict(8, 0.6, 0.02, 0.09), Verdict(8, 0.9, 0.02, 1e-5)), True),
        ((Verdict(3, 1.0, 0.06, 0.09), Verdict(3, 1.0, 0.05, 0.09)), True),
        ((Verdict(8, 0.6, 0.1, 0.11), Verdict(8, 0.9, 0.3, 1e-9)), False),
        ((Verdict(8, 0.5, 0.1, 0.01), Verdict(8, 0.9, 0.3, 0.005)), False),
        ((Verdict(8, 0.6, 0.04, 0.02), Verdict(8, 0.9, 0.3, 0.01)), False),
    ],
    ids=[
        "clear together",
        "one clear, one likely",
        "few, but a large gain",
        "one by chance",
        "as many as not",
        "weak and small",
    ],
)
def test_evidence_or_gain_on_both_sides(sides, convinces):
    """A trial convinces by clear evidence or a large gain on both sides."""
    settings = CflSettings(prefer=0.5, margin=0.05, p_value=0.001)
    assert settings.convinces(sides) is convinces
    assert settings.convinces(sides[::-1]) is convinces


def test_each_refusal_raises_the_bar():
    """Each refused candidate makes the evidence that convinces stronger."""
    settings, weak = (
        CflSettings(p_value=0.001, margin=0.1),
        (Verdict(3, 1.0, 0.01, 0.0186), Verdict(2, 1.0, 0.01, 0.0024)),
    )
    assert [settings.convinces(weak, refused) for refused in (0, 4)] == [True, False]
    strong, large = (Verdict(8, 1.0, 0.01, 1e-4),) * 2, (Verdict(3, 1.0, 0.2, 0.05),) * 2
    assert settings.convinces(strong, 9)
    assert settings.convinces(large, 9)
