"""IFCA against the paper's own formulas, written out in plain numpy, on a mixture of linear regressions.

The devices here score and train with the device's code; their updates are masked, go through the strategy, and come back.
The oracle knows neither states nor masks: it holds k models in float64 and follows Alg. 2 line by line.
"""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import norm_of
from aggregator.strategies.drawing import drawn
from crypto.mask.derivation import derive, segment_keys
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import VersionKey
from edge_client.learning import scoring, training
from edge_client.learning.data import Dataset
from edge_client.learning.model import Score
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.recipe import LocalTraining
from shoal.types import MaskedVector
from tests.helpers.plans import KEY_VERSION, Rounds, contribution, run_plan

M, N, D, SHARED = 12, 30, 8, 5
DEVICES = tuple(f"dev-{i:02d}" for i in range(M))
WHOLE = (SegmentSpec("cluster", D),)
PARTS = (SegmentSpec("shared", SHARED), SegmentSpec("cluster", D - SHARED))
TURNED = (SegmentSpec("cluster", D - SHARED), SegmentSpec("shared", SHARED))
FULL = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.1, lr_decay=0.9, momentum=0.0, clip=0.0, prox_mu=0.0)
LOCAL = dataclasses.replace(FULL, steps=3)


class Regression:
    """Linear regression with squared loss (ifca section 5.1) as the device's code wants it."""

    def score(self, theta, x, y):
        return Score(float(np.mean((x @ theta.astype(np.float64) - y) ** 2)), 0, len(y))

    def grad(self, theta, x, y):
        residual = x @ theta.astype(np.float64) - y
        return float(np.mean(residual**2)), (2 / len(y) * (x.T @ residual)).astype(np.float32)


def population(k, seed, shared=None):
    """Return device -> Batch of float64: device i's target is model i mod k; they agree in the coordinates ``shared``."""
    rng = np.random.default_rng(seed)
    targets = rng.standard_normal((k, D))
    if shared is not None:
        targets[:, shared] = targets[0, shared]
    data = {}
    for i, name in enumerate(DEVICES):
        x = rng.standard_normal((N + i, D))
        data[name] = Dataset(x, x @ targets[i % k] + 0.05 * rng.standard_normal(N + i))
    return data


def loss_of(theta, batch):
    return np.mean((batch.x @ theta - batch.y) ** 2)


def gradient_of(theta, batch):
    return 2 / len(batch.y) * batch.x.T @ (batch.x @ theta - batch.y)


def plain_round(models, data, present, lr, tau, option, shared, by_samples=False):
    """Return (models after, identities, mean loss) of one round of Alg. 2: ``models`` (k, d) float64, equal in ``shared``."""
    identity, local, weight = {}, {}, {}
    for i in present:
        identity[i] = int(np.argmin([loss_of(theta, data[i]) for theta in models]))
        theta = models[identity[i]].copy()
        for _ in range(tau):
            theta -= lr * gradient_of(theta, data[i])
        local[i], weight[i] = theta, len(data[i].y) if by_samples else 1
    loss = sum(len(data[i].y) * loss_of(models[identity[i]], data[i]) for i in present)
    after = models.copy()
    for j in range(len(models)):
        group = [i for i in present if identity[i] == j]
        if option == "gradient":
            after[j] -= lr / M * sum((gradient_of(models[j], data[i]) for i in group), np.zeros(D))
        elif group:
            after[j] = sum(weight[i] * local[i] for i in group) / sum(weight[i] for i in group)
    if option == "gradient":
        everybody = sum(gradient_of(models[identity[i]], data[i])[shared] for i in present)
        after[:, shared] = models[0, shared] - lr / M * everybody
    else:
        everybody = sum(weight[i] * local[i][shared] for i in present)
        after[:, shared] = everybody / sum(weight.values())
    return after, identity, loss / sum(len(data[i].y) for i in present)


def plain_ifca(run, data, origins, presence, *, k, restarts, restart_rounds, shared, option, by_samples):
    """Return (models (k, d), last identities, kept start) of a whole run: all starts, then the best one to the end."""
    local, finished, round_ = run.local, [], 0

    def play(models, rounds):
        nonlocal round_
        identities, loss = {}, 0.0
        for _ in range(rounds):
            lr, present = local.lr * local.lr_decay**round_, presence[round_]
            models, identity, loss = plain_round(
                models, data, present, lr, local.steps, option, shared, by_samples=by_samples
            )
            identities |= identity
            round_ += 1
        return models, identities, loss

    for start in range(restarts):
        models = origins[start * k : (start + 1) * k].astype(np.float64)
        models[:, shared] = models[0, shared]
        finished.append(play(models, restart_rounds if restarts > 1 else run.recipe.rounds))
    best = int(np.argmin([loss for *_, loss in finished]))
    models, identities, _ = finished[best]
    if restarts > 1:
        models, more, _ = play(models, run.recipe.rounds - round_)
        identities = identities | more
    return models, identities, best


def keys_of(run, round_):
    """Return the mask key of a round, and segment -> its part."""
    chain = VersionKey(run.fleet, KEY_VERSION, b"s" * 32).begin_run(run.run_id, run.run)
    chain.skip_to(round_)
    keys = chain.take()
    key = derive(keys.mask, keys.context(run.task_digest, run.recipe.mode, run.mask_segments))
    return key, segment_keys(key)


class Driven(Rounds):
    """The strategy with devices that compute: the run's models after each round, in clear float32.

    Attributes:
        seen: the means of the last round as the aggregator has them, by model.
    """

    def __init__(self, run, data, origins):
        super().__init__(run, DEVICES, origins=origins)
        self.run, self.data = run, data
        self.key, self.seen = None, {}

    def settle(self):
        parts = keys_of(self.run, self.round)[1]
        self.seen = {}
        super().settle()
        self.seen = {step.state.model: step.mean for step in self.steps if step.mean is not None}
        for step in self.steps:
            if step.mean is not None:
                segment = ""
                if len(self.run.segments) > 1:
                    segment = "shared" if step.state.model == SHARED_MODEL else "cluster"
                key = parts[segment]
                clear = unmask(MaskedVector(step.mean, key.key_id), key)
                self._vectors[step.state] = self._vectors[step.state] - step.mean + clear

    def thetas(self, plan):
        """Return theta (d,) float32 by model id."""
        return {model: self.whole(plan, model).astype(np.float32) for model in plan.models}

    def answer(self, device, assignment, round_):
        batch, local = self.data[device], self.run.local
        thetas = self.thetas(self.plan)
        losses = scoring.score([thetas[c] for c in assignment.candidates], batch, Regression())
        chosen = assignment.candidates[scoring.choose(losses)]
        recipe = LocalTraining(0, local.steps, 0, local.lr, lr_decay=local.lr_decay)
        result = training.train(
            thetas[chosen], batch, recipe, Regression(), np.random.default_rng(0), round_ - 1, lambda: False
        )
        key, _ = keys_of(self.run, round_)
        vector = mask(result.delta, key).values
        return contribution(
            device,
            vector,
            model=chosen,
            round=round_,
            samples=len(batch.y),
            loss=float(losses.min()),
            key_id=key.key_id,
            norm=norm_of(vector),
        )

    def play(self):
        """Do the whole run; return who took part, round by round."""
        presence = []
        while self.round < self.run.recipe.rounds:
            self.step(self.answer)
            self.reload()  # stored and loaded between all rounds
            presence.append(tuple(self.plan.assignments))
        return presence

    def models(self):
        """Return the kept start's models, (k, d) float32, in clear."""
        thetas = self.thetas(self.strategy.final(self.state, self.run.recipe.rounds + 1, DEVICES))
        return np.stack([thetas[j] for j in sorted(thetas)])


def driven(k=2, restarts=1, rounds=12, segments=WHOLE, mode="permutation", seed=0, participation=1.0, **settings):
    """Return (fleet after its run, who took part, oracle's models, identities, kept start)."""
    option = settings.get("option", "model")
    values = {"k": k, **settings}
    if restarts > 1:
        values |= {"restarts": restarts, "restart_rounds": 3}
    run = run_plan(
        "ifca",
        values,
        origins=k * restarts,
        rounds=rounds,
        segments=segments,
        mode=mode,
        seed=seed,
        participation=participation,
        local=FULL if option == "gradient" else LOCAL,
    )
    shared = run.span("shared") if len(segments) > 1 else slice(0, 0)
    data = population(k, seed, shared)
    origins = np.random.default_rng([seed, 1]).standard_normal((k * restarts, D)).astype(np.float32)
    fleet = Driven(run, data, origins)
    presence = fleet.play()
    expected = plain_ifca(
        run,
        data,
        origins,
        presence,
        k=k,
        restarts=restarts,
        restart_rounds=3,
        shared=shared,
        option=option,
        by_samples=settings.get("normalise") == "samples",
    )
    return fleet, presence, *expected


CASES = {
    "option II": {},
    "option I, decaying steps": {"option": "gradient"},
    "three clusters": {"k": 3},
    "by samples": {"normalise": "samples"},
    "option II, some take part": {"participation": 0.5},
    "option I, some take part": {"option": "gradient", "participation": 0.5},
    "restarts": {"restarts": 3, "rounds": 15},
    "restarts, option I, some take part": {"restarts": 2, "option": "gradient", "participation": 0.5},
}


# The first two masked: only in `make long`, since `test_a_mask_changes_not_one_bit` compares them with the clear ones.
@pytest.mark.parametrize(
    ("segments", "mode"),
    [
        pytest.param(WHOLE, "none", id="whole-none"),
        pytest.param(WHOLE, "permutation", id="whole-permutation", marks=pytest.mark.long),
        pytest.param(PARTS, "none", id="shared+cluster-none"),
        pytest.param(PARTS, "permutation", id="shared+cluster-permutation", marks=pytest.mark.long),
        pytest.param(TURNED, "none", id="cluster+shared-none"),
        pytest.param(TURNED, "permutation", id="cluster+shared-permutation"),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_the_strategy_computes_alg_2(case, segments, mode):
    """Models to 1e-6 and every identity, with and without weight sharing, masked and not."""
    fleet, presence, models, identities, start = driven(segments=segments, mode=mode, **CASES[case])
    np.testing.assert_allclose(fleet.models(), models, atol=1e-6, rtol=0)
    assert (dict(fleet.state.choice), fleet.state.start) == (identities, start)
    assert {len(p) for p in presence} == {round(M * CASES[case].get("participation", 1.0))}
    assert presence[0] == drawn(fleet.run, 1, DEVICES)


@pytest.mark.parametrize("segments", [WHOLE, PARTS], ids=["whole", "shared+cluster"])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_changes_not_one_bit(case, segments):
    masked, *_ = driven(segments=segments, **CASES[case])
    clear, *_ = driven(segments=segments, mode="none", **CASES[case])
    assert masked.models().tobytes() == clear.models().tobytes()
    assert masked.state.choice == clear.state.choice
    assert {m: v.tobytes() for m, v in masked.seen.items()} != {m: v.tobytes() for m, v in clear.seen.items()}
