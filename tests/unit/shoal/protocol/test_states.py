"""Messages about model states: each refuses what no honest party sends, before memory is taken."""

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol import states
from shoal.protocol.codec import decode, encode
from shoal.protocol.states import (
    MAX_OPEN_STATES,
    MAX_RETAINED_RECIPES,
    MAX_TERMS,
    HeldState,
    MeanRef,
    RetainedStep,
    RoundModels,
    StateCertificate,
    StateId,
    Statement,
    StateRecipe,
    Step,
    Term,
    read_certificate,
)
from tests.helpers.model_states import FLEET, RUN_ID, recipe, step

DIGEST = bytes(32)


def test_messages_come_back_as_they_were():
    trial = step(7, recipe(1, 7, (0, 6), mean=1.0), recipe(2, 7, (0, 6, 0.5), (1, 3, -0.5)), also_open=[(0, 6)])
    assert decode(encode(trial), Step) == trial
    statement = Statement(FLEET, RUN_ID, 7, "dev-1", (HeldState(0, 6, DIGEST), HeldState(1, 7, DIGEST)))
    assert decode(encode(statement), Statement) == statement
    certificate = StateCertificate((b"one", b"two"))
    assert read_certificate(encode(certificate)) == certificate


def test_names_of_states():
    assert recipe(1, 7, (0, 6)).state == StateId(1, 7)
    assert recipe(1, 7, (0, 6)).terms[0].state == StateId(0, 6) == HeldState(0, 6, DIGEST).state
    assert sorted([StateId(1, 2), StateId(0, 9), StateId(1, 1)]) == [StateId(0, 9), StateId(1, 1), StateId(1, 2)]
    assert len(recipe(0, 4, *[(0, 3)] * MAX_TERMS).terms) == MAX_TERMS
    weights = (0.0, 1e-12, -1e6)
    assert tuple(StateRecipe(0, 1, (Term(0, 0, weight),), weight).mean for weight in weights) == weights


@pytest.mark.parametrize("weight", [2e6, -2e6, 1e-13, 1e-300])
def test_weights_float32_loses_are_refused(weight):
    """Weights that float32 may lose are refused."""
    with pytest.raises(WireError, match="weight"):
        Term(0, 1, weight)
    with pytest.raises(WireError, match="weight"):
        StateRecipe(0, 1, (Term(0, 0, 1.0),), weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipe(0, 4, (0, 4)), "of that round or later"),
        (lambda: recipe(0, 4), "a recipe of 0 states"),
        (lambda: recipe(0, 4, *[(0, 3)] * (MAX_TERMS + 1)), "a recipe of"),
        (lambda: Step(7, (recipe(0, 6, (0, 5)),), ()), "another round"),
        (lambda: Step(7, (recipe(0, 7, (0, 5)), recipe(0, 7, (0, 6))), ()), "ascending"),
        (lambda: Step(7, (), (StateId(1, 7), StateId(0, 7))), "ascending"),
        (lambda: Step(7, (), (StateId(1, 8),)), "later state"),
        (lambda: Step(7, tuple(recipe(m, 7, (0, 6)) for m in range(MAX_TERMS + 1)), ()), "recipes"),
        (
            lambda: Step(9, (), tuple(StateId(m // 3, m % 3) for m in range(MAX_OPEN_STATES + 1))),
            "open states are over",
        ),
        (
            lambda: Statement(FLEET, RUN_ID, 7, "dev-1", (HeldState(0, 6, DIGEST), HeldState(0, 6, b"x" * 32))),
            "ascending",
        ),
        (lambda: Statement(FLEET, RUN_ID, 7, "Dev 1", ()), "device name"),
        (lambda: Statement("../x", RUN_ID, 7, "dev-1", ()), "fleet name"),
    ],
    ids=[
        *("a later state in a recipe", "an empty recipe", "a long recipe", "a recipe of another round"),
        *("two recipes of a model", "open states in disorder", "a later open state", "too many recipes"),
        *("too many open states", "two digests of one state", "device name", "fleet name"),
    ],
)
def test_impossible_step_is_refused(make, message):
    """A step holds one recipe a model; a device can't sign two digests of one state in one statement."""
    with pytest.raises(WireError, match=message):
        make()


def test_too_long_is_refused_undecoded(monkeypatch):
    """What is too long is refused before it is decoded."""
    monkeypatch.setattr("shoal.protocol.states.decode", None)
    with pytest.raises(WireError, match="a certificate of"):
        read_certificate(bytes(limits.MAX_CERTIFICATE_BYTES + 1))


def retained(*recipes):
    found = step(recipes[0].round if recipes else 7, *recipes)
    return RetainedStep(found, tuple(MeanRef(r.model, "x", bytes(16), 3) for r in recipes if r.mean is not None))


def test_announcement_retains_old_steps(monkeypatch):
    """Two models stand still since rounds 1 and 2."""
    old = [retained(recipe(m, m, (0, 0), mean=1.0)) for m in (1, 2)]
    found = RoundModels(3, (), (*old, retained(recipe(0, 8, (0, 7), mean=1.0)), retained(recipe(0, 9, (0, 8)))))
    assert decode(encode(found), RoundModels) == found
    with pytest.raises(WireError, match="ascending"):
        RoundModels(3, (), found.steps[::-1])
    with pytest.raises(WireError, match="changes no model"):
        RoundModels(3, (), (retained(), found.steps[-1]))
    assert RoundModels(3, (), (*old, retained())).newest.recipes == ()
    monkeypatch.setattr(states, "MAX_RETAINED_RECIPES", 3)
    with pytest.raises(WireError, match="more than 3 recipes"):
        RoundModels(3, (), found.steps)
    assert MAX_RETAINED_RECIPES == 2 * (limits.MAX_MODELS + 1)
