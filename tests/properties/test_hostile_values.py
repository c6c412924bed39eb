"""Well-formed messages with any values in them: the rules refuse some, and neither side fails on those that they accept."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.engine import CameOnline
from aggregator.rounds.snapshot import dump
from aggregator.strategies.base import norm_of
from crypto.seal.replay import ReplayWatermark
from edge_client.protocol import round_state as agent
from shoal.errors import UntrustedError, WireError
from shoal.protocol.messages import Action, Announcement, Assignment, Control, Phase, Share
from shoal.protocol.states import CheckpointRef, Offer, RoundModels, StateId
from tests.helpers.plans import FULL_BATCH, digest_of, engine_of, run_plan, stored, upload_of
from tests.properties.parsers.wire import STRATEGIES

ROUNDS = 4
DEVICES = ("dev-0", "dev-1", "dev-2", "dev-3")
COUNTS = (0, 1, 2, 7, 2**16, 2**31, 2**32 - 1)
FIGURES = (0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-300, 1e300, -1e300, 1.7e308, 3.4e38, -3.4e38, 2.5, 4.9999)
PLACES = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 1e-20, 1e-3, 30.0, -40.0)
MARGINS = (0.0, 5.0, -5.0, 5.01, 1e300, 0.01)
few = settings(max_examples=settings.default.max_examples // 16, suppress_health_check=list(HealthCheck))


def plan_of(name):
    settings_ = STRATEGIES[name]
    local = dataclasses.replace(FULL_BATCH, momentum=0.0)
    origins = 2 if name == "ifca" else 1
    return run_plan(name, settings_, origins=origins, local=local, pretrain=local, rounds=ROUNDS, quorum=1.0)


def hostile(engine, state, device, random):
    """Return an upload to the open round in which everything that a device may choose is chosen by ``random``."""
    order, length = state.plan.assignments[device], engine.run.length
    values = np.array([random.choice(PLACES) for _ in range(length)]) * random.choice((0.0, 1.0, 1.0, 1e-30))
    changes = {}
    if random.random() < 0.9:
        changes |= {"samples": random.choice(COUNTS), "loss": random.choice(FIGURES)}
        changes["margins"] = tuple(random.choice(MARGINS) for _ in order.candidates) if order.margins else ()
        tested = random.choice(COUNTS[1:]) if order.evaluate else 0
        changes |= {"tested": tested, "correct": random.choice((0, tested))}
        changes["model"] = random.choice((*order.candidates, 0, 9))
    if order.norm:
        changes["model_norm"] = abs(random.choice(FIGURES)) or 1.0
    return upload_of(engine, state, device, values=values, **changes)


@pytest.mark.parametrize("name", STRATEGIES)
@few
@given(random=st.randoms(use_true_random=False))
def test_whatever_devices_report_run_goes_on(name, random):
    """Four rounds in which every upload that the rules let pass counts; the state can be dumped and loaded after each."""
    engine = engine_of(plan_of(name))
    state, _ = engine.begin(DEVICES)
    for device in DEVICES:
        state, _ = engine.handle(state, CameOnline(device))
    for _ in range(20):
        if state.finished:
            break
        (device, *_) = state.waiting
        upload, body = hostile(engine, state, device, random)
        verdict, _ = engine.validate(state, upload, digest_of(upload, body))
        if verdict is not Decision.STORE:
            upload, body = honest(engine, state, device)
        norm = norm_of(np.frombuffer(body, "<f4", upload.length)) if upload.length else 0.0
        assert norm <= engine.run.recipe.norm_limit
        state, _ = engine.handle(state, stored_with(upload, body))
        dump(state.strategy, state.held)
    assert state.finished


def honest(engine, state, device):
    order = state.plan.assignments[device]
    return upload_of(engine, state, device, **({"model_norm": 2.0} if order.norm else {}))


def stored_with(upload, body):
    return dataclasses.replace(stored(upload, body), model_norm=upload.model_norm)


def test_the_rules_refuse_some_of_it():
    """The control: some of the drawn values are accepted and some refused."""
    from random import Random

    engine, random = engine_of(plan_of("ifca")), Random(1)
    state, _ = engine.begin(DEVICES)
    for device in DEVICES:
        state, _ = engine.handle(state, CameOnline(device))
    uploads = [hostile(engine, state, "dev-0", random) for _ in range(200)]
    verdicts = [engine.validate(state, u, digest_of(u, b))[0] for u, b in uploads]
    assert 20 < verdicts.count(Decision.STORE) < 180


PLAN = run_plan("ifca", {"k": 2}, origins=2, max_models=2, rounds=ROUNDS)
numbers = st.sampled_from([0, 1, 2, ROUNDS, ROUNDS + 1, 2**16 - 1])
wide = numbers | st.sampled_from([2**31, 2**32 - 1])
reals = st.sampled_from([*FIGURES, 1e6, 1e6 + 1])
sixteen = st.sampled_from([bytes(16), PLAN.run_id, b"x" * 16])
labels = st.sampled_from(["", "a" * 16, "../x", "\x00", "label"])
assignments = st.builds(
    Assignment,
    phase=st.sampled_from([int(p) for p in Phase]),
    candidates=st.lists(numbers, min_size=1, max_size=3).map(tuple),
    share=st.sampled_from([int(s) for s in Share]),
    train=st.booleans(),
    evaluate=st.booleans(),
    margins=st.booleans(),
    norm=st.booleans(),
)
offers = st.builds(Offer, model=numbers, at=st.builds(StateId, model=numbers, round=numbers))
checkpoints = st.builds(
    CheckpointRef,
    state=st.builds(StateId, model=numbers, round=numbers),
    round=wide,
    key_version=wide,
    label=labels,
    transfer=sixteen,
)
models = st.builds(
    RoundModels,
    key_version=wide,
    offers=st.lists(offers, max_size=3, unique_by=lambda o: o.model).map(
        lambda found: tuple(sorted(found, key=lambda o: o.model))
    ),
    checkpoints=st.lists(checkpoints, max_size=3, unique_by=lambda c: c.state).map(
        lambda found: tuple(sorted(found, key=lambda c: c.state))
    ),
)
announcements = st.builds(
    Announcement,
    fleet=st.sampled_from(["demo", "other"]),
    run=st.sampled_from([1, 1, 1, 2]),
    run_id=st.just(PLAN.run_id) | sixteen,
    roster_sequence=st.just(3) | wide,
    round=st.sampled_from([1, 1, 2, 5]) | wide,
    nonce=sixteen,
    deadline_s=reals,
    finished=st.booleans(),
    assignments=st.lists(assignments, max_size=3).map(tuple),
    assignment_of=st.lists(st.sampled_from([0, 0, 1, 5, 0xFFFF]), max_size=3).map(tuple),
    held=models,
)
controls = st.builds(
    Control,
    fleet=st.just("demo"),
    device=st.just("dev-0"),
    action=st.sampled_from([int(a) for a in Action]),
    run=wide,
    round=wide,
    transfer=st.sampled_from([b"t" * 16, bytes(16)]),
    missing=st.lists(wide, max_size=3).map(tuple),
    reason=st.text(max_size=9),
)


@settings(suppress_health_check=list(HealthCheck))
@given(stream=st.lists(announcements | controls, max_size=6))
def test_false_aggregator_ends_no_device(stream):
    """Any sequence of an aggregator's announcements and answers: the watermark never decreases, and refusals change nothing."""
    state, _ = agent.step(agent.RoundState(0), agent.Planned(PLAN))
    for said in stream:
        before = state
        event = agent.Announced(said) if isinstance(said, Announcement) else agent.Answered(said)
        try:
            state, actions = agent.step(state, event)
        except (UntrustedError, WireError):
            assert state is before
            continue
        assert mark_of(state.mark) >= mark_of(before.mark)
        for action in actions:
            if isinstance(action, agent.Work):
                state, _ = agent.step(state, agent.WorkDone(said.run, said.round, said.nonce, b"t" * 16))
                assert state.stage is agent.Stage.SENDING


def mark_of(mark: ReplayWatermark):
    return mark.roster, mark.run, mark.round
