"""One device can't own the model: false sample counts and oversized updates, on a whole fleet in every strategy."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackFleet

from shoal.owner.runs.plan import origins_needed
from shoal.protocol.messages import Action
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    CLASSES,
    FULL_BATCH,
    INPUTS,
    Wiretap,
    answers,
    grouped_data,
    inject,
    open_upload,
    restart_aggregator,
    seal_upload,
    thetas,
    uploads_of,
    with_body,
)
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle

COUNT = 8
LIAR, GIANT = "dev-06", "dev-07"
MOST_SAMPLES = 2**32 - 1
TRAINING_SAMPLES = 36
"""Of the 60 that each device has."""
PROXIMAL = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.8, prox_mu=0.1)
STRATEGIES = {
    "fedavg": {},
    "fedprox": {"local": PROXIMAL},
    "ifca": {"settings": {"k": "2", "option": "model", "normalise": "samples"}},
    "cfl": {},
    "fedgroup": {"settings": {"groups": "2", "alpha": "4"}},
    "fedgrouprox": {"settings": {"groups": "2", "alpha": "4"}, "local": PROXIMAL},
    "fesem": {"settings": {"k": "2"}},
    "one-shot": {"settings": {"k": "2"}},
}


def scaled(upload, body, factor):
    """Return the update (d,) of an upload times a factor."""
    return np.frombuffer(body, "<f4", upload.length) * np.float32(factor)


def reversed_with(samples):
    """Return a false upload: the negated update, with this sample count."""
    return lambda upload, body: with_body(dataclasses.replace(upload, samples=samples), scaled(upload, body, -1))


def times(factor):
    return lambda upload, body: with_body(upload, scaled(upload, body, factor))


class Hostile:
    """A fleet in which some devices' uploads are replaced in flight by those of ``lies``."""

    def __init__(self, root, lies, algorithm="fedavg", **changes):
        self.tap, self.lies, self.sent = Wiretap(), lies, dict.fromkeys(lies, 0)
        wanted = {"rounds": 4, "local": FULL_BATCH, "seed": 1, "min_contributors": 1, "quorum": 0.6}
        options = a_recipe(algorithm, **wanted | STRATEGIES.get(algorithm, {}) | changes)
        bundle = logistic_bundle(INPUTS, CLASSES)
        rng = np.random.default_rng(3)
        self.origins = rng.standard_normal((origins_needed(options), bundle.manifest.length)).astype(np.float32) / 10
        self.fleet = LoopbackFleet(root, bundle, grouped_data(COUNT), options, self.tap, origins=self.origins)
        for name in lies:
            self.tap.lose(client=self.fleet.client_id(name), ending="/up")

    def step(self):
        self.fleet.step()
        for name, lie in self.lies.items():
            made = uploads_of(self.fleet, self.tap, name)
            for sealed in made[self.sent[name] :]:
                upload, body = open_upload(self.fleet, name, sealed)
                if upload.length:
                    upload, body = lie(upload, body)
                inject(self.fleet, name, seal_upload(self.fleet, name, upload, body))
            self.sent[name] = len(made)

    def run(self, until=lambda: False, max_virtual_s=600):
        end_s = self.fleet.now_s + max_virtual_s
        while not (self.fleet.finished or until()):
            assert self.fleet.now_s < end_s, self.fleet.service.status()
            self.step()
        self.fleet.settle()
        return self.fleet.records()

    def steps(self):
        """Return device -> its final model less the nearest origin, (d,)."""
        found = {}
        for name, data in thetas(self.fleet).items():
            apart = np.frombuffer(data, np.float32) - self.origins
            found[name] = apart[np.linalg.norm(apart, axis=1).argmin()]
        return found


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def honest_names():
    return [f"dev-{i:02d}" for i in range(COUNT - 2)]


def assert_close_to_honest(found, honest):
    for name in honest_names():
        assert cosine(found[name], honest[name]) > 0.5, name
        assert np.linalg.norm(found[name]) < 2 * np.linalg.norm(honest[name]), name


def training(records):
    return [r for r in records if not r["final"]]


@pytest.fixture(scope="module")
def honest_steps(tmp_path_factory):
    """Return a function (algorithm, changed options) -> what the devices of an honest fleet end with; each fleet runs once."""
    known = {}

    def steps(algorithm, changes):
        key = algorithm, repr(changes)
        if key not in known:
            scene = Hostile(tmp_path_factory.mktemp("honest") / "fleet", {}, algorithm, **changes)
            with scene.fleet:
                scene.run()
                known[key] = scene.steps()
        return known[key]

    return steps


@pytest.mark.parametrize("algorithm", with_long(sorted(STRATEGIES), "fedavg"))
def test_neither_count_nor_length_decides(tmp_path, honest_steps, algorithm):
    """Neither a huge sample count nor a hundredfold update decides the model."""
    expected = honest_steps(algorithm, {})
    lies = {LIAR: reversed_with(MOST_SAMPLES), GIANT: times(100)}
    scene = Hostile(tmp_path / "hostile", lies, algorithm)
    with scene.fleet:
        records = training(scene.run())
        assert_close_to_honest(scene.steps(), expected)
        assert {r["declined"].get(LIAR, "upload") for r in records} == {"upload"}
        assert any(LIAR in r["declined"] for r in records)
        assert any(GIANT in r["refused_norm"] for r in records)
        assert all(set(r["refused_norm"]) <= {GIANT} for r in records)
        assert not any(r["capped"] for r in records)
        told = [a for a in answers(scene.fleet, scene.tap, LIAR) if a.action == Action.REFUSED]
        assert any("above the plan's max_samples 100000" in a.reason for a in told)


@pytest.mark.parametrize(
    "algorithm", with_long(["fedavg", "fedprox", "ifca", "cfl", "fedgroup", "fesem", "one-shot"], "fesem")
)
def test_false_count_weighs_three_devices(tmp_path, honest_steps, algorithm):
    """A false sample count below the limit weighs three devices."""
    expected = honest_steps(algorithm, _one_group(algorithm))
    scene = Hostile(tmp_path / "hostile", {LIAR: reversed_with(100_000)}, algorithm, **_one_group(algorithm))
    with scene.fleet:
        records = training(scene.run())
        found = scene.steps()
        assert all(cosine(found[name], expected[name]) > 0.5 for name in honest_names())
        assert {d for r in records for d in r["capped"]} == {LIAR}
        assert {w for r in records for w in r["capped"].values()} == {3.0 * TRAINING_SAMPLES}


def test_reversed_updates_are_left_out(tmp_path):
    """Also by an aggregator that is killed in between: what it knew of the device is in the snapshot."""
    scene = Hostile(tmp_path, {LIAR: reversed_with(TRAINING_SAMPLES)}, rounds=5, quorum=1.0)
    with scene.fleet as fleet:
        scene.run(until=lambda: len(fleet.records()) == 2)
        restart_aggregator(fleet)
        records = training(scene.run())
        named = [(e["round"], e["device"]) for r in records for e in r["events"] if e["kind"] == "stands-apart"]
        assert named == [(3, LIAR)]


def _one_group(algorithm):
    names = {"ifca": "k", "fesem": "k", "one-shot": "k", "fedgroup": "groups"}
    settings = dict(STRATEGIES[algorithm].get("settings", {}))
    if algorithm in names:
        settings[names[algorithm]] = "1"
    return {**STRATEGIES[algorithm], "settings": settings}


def test_restart_leaves_out_the_same_updates(tmp_path):
    """It is killed in round 3, after it has acknowledged uploads and before the round is closed."""
    done = [run_with_a_giant(tmp_path / name, crash=name == "crash") for name in ("calm", "crash")]
    assert done[0] == done[1]


def run_with_a_giant(root, *, crash):
    """Return the rounds' norms and one device's final model."""
    scene = Hostile(root, {GIANT: times(100)}, quorum=1.0, mode="permutation")
    with scene.fleet as fleet:
        if crash:
            scene.run(until=lambda: len(fleet.records()) == 2 and uploads_of(fleet, scene.tap, "dev-00")[2:])
            restart_aggregator(fleet)
        records = training(scene.run())
        assert [set(r["refused_norm"]) for r in records] == [{GIANT}] * 4
        return [r["norms"] for r in records], thetas(fleet)["dev-00"]
