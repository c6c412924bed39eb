"""The grid of the trainers' times, the fit of their costs, and the judgement of a choice."""

import sys

import numpy as np
import pytest
import torch

from shoal.bench.numerics import trainers
from shoal.bench.numerics.trainers import Case, cases, counted, fit, judge, main, measure
from shoal.simulation.trainers.costs import TERMS
from shoal.simulation.trainers.networks import Linear, OneHidden

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A grid of eight cases, each of a few samples."""
    monkeypatch.setattr(trainers, "NETWORKS", {"linear": Linear(6), "mlp": OneHidden(12, 3, 2)})
    for name, values in (("SAMPLES", (4,)), ("BATCHES", (0, 2)), ("EPOCHS", (1, 3)), ("DEVICES", (2,))):
        monkeypatch.setattr(trainers, name, values)


def test_cases_are_the_grid_without_what_takes_too_long(monkeypatch):
    assert len(cases()) == 8
    work = sorted(case.work for case in cases())
    assert work[0] == 4 * 2 * 1 * 6
    monkeypatch.setattr(trainers, "MOST_WORK", work[3])
    assert len(cases()) == 4


def test_full_batches_take_steps_and_unequal_devices_have_up_to_300_samples():
    full = Case(network="mlp", samples=0, batch=0, epochs=3, devices=5)
    assert (full.local.steps, full.local.epochs, full.local.batch_size) == (3, 0, 0)
    assert (full.sizes.min(), full.sizes.max(), len(full.sizes)) == (10, 300, 5)


def test_each_trainer_that_can_is_measured_and_threads_are_left_alone():
    threads = torch.get_num_threads()
    took = measure(Case(network="mlp", samples=4, batch=2, epochs=1, devices=2), turns=1)
    assert took.keys() == TERMS.keys()
    assert all(seconds > 0 for seconds in took.values())
    assert measure(Case(network="linear", samples=4, batch=2, epochs=1, devices=2), turns=1).keys() == {
        "dual",
        "batched",
    }
    assert measure(Case(network="linear", samples=7, batch=2, epochs=1, devices=2), turns=1).keys() == {"batched"}
    assert torch.get_num_threads() == threads


def test_a_fit_finds_the_costs_that_times_were_made_of():
    """With costs of few terms: times of 2 ns a number of a sample and 5 us a step."""
    times = []
    for case in cases():
        works = counted(case)
        made = {name: {"sample": 2.0, "step": 5000.0} for name in works}
        counts = {name: TERMS[name](work) for name, work in works.items()}
        times.append((case, {n: 1e-9 * sum(made[n][t] * counts[n][t] for t in made[n]) for n in works}))
    costs = fit(times)
    for case, took in times:
        works = counted(case)
        for name, seconds in took.items():
            assert trainers.seconds(name, works[name], costs) == pytest.approx(seconds, rel=0.05)
    assert judge(times, costs)["mean"] == pytest.approx(1.0, abs=0.05)


def test_a_choice_is_judged_by_the_fastest(monkeypatch):
    """A rule that always says dual, where it takes twice and three times as long as the fastest."""
    both = [Case(network="mlp", samples=4, batch=2, epochs=epochs, devices=2) for epochs in (1, 3)]
    times = [(both[0], {"dual": 2.0, "batched": 1.0}), (both[1], {"dual": 3.0, "batched": 1.0, "stepwise": 1.5})]
    monkeypatch.setattr(trainers, "seconds", lambda name, _work, _costs: float(name != "dual"))
    found = judge(times)
    assert (found["cases"], found["fastest"], found["mean"], found["largest"]) == (2, 0.0, 2.5, 3.0)
    assert (found["always batched"], found["always dual"], found["always stepwise"]) == (1.0, 2.5, 1.25)


def test_the_program_prints_every_case_and_the_judgement(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainers", "--fit"])
    monkeypatch.setattr(trainers, "TURNS", 1)
    main()
    out = capsys.readouterr().out
    assert out.count(" ms\n") == 8
    assert '"costs"' in out
    assert np.isfinite(float(out.rsplit('"mean": ', 1)[1].split(",")[0]))
