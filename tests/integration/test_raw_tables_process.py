"""A fleet whose devices have raw tables, unscaled and with labels of text, by the console commands alone."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers import calls
from tests.helpers.forked_stages import ForkedProgram
from tests.helpers.trees import ONE_THREAD, PROGRAMS, ROOT

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
DEVICES = ("dev-1", "dev-2", "dev-3")
SEPARATORS = dict(zip(DEVICES, (",", ";", ","), strict=True))
END_S = 90


class Console:
    """Calls the programs as a person does."""

    def __init__(self, home):
        self.home = home
        self.environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}

    def start(self, program, *arguments):
        """Start a program, with its output in a file."""
        log = self.home / f"{program}-{arguments[1]}.log"
        return ForkedProgram(PROGRAMS[program], list(map(str, arguments)), self.environment, log)

    def __call__(self, program, *arguments):
        """Run a command to its end, and return what it prints."""
        done = calls.call(program, [str(a) for a in arguments], self.home, self.environment)
        assert done.status == 0, done.err
        return done.out


def write_tables(home):
    """Write each device's table and one of held-out rows; each has another order of columns, and one another separator."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    rng = np.random.default_rng(3)
    order = rng.permutation(len(found.target))
    names = [*found.feature_names, "diagnosis"]
    lines = [f"{name},0,{2 * found.data[:, i].max():g}" for i, name in enumerate(found.feature_names)]
    (home / "features.txt").write_text("\n".join(lines))
    for i, device in enumerate(DEVICES):
        columns = rng.permutation(len(names))
        rows = order[i::3]
        for suffix, part in (("", rows[:-40]), ("-held", rows[-40:])):
            table = [[*map(repr, found.data[row].tolist()), str(found.target_names[found.target[row]])] for row in part]
            text = [SEPARATORS[device].join(str(row[c]) for c in columns) for row in [names, *table]]
            (home / f"{device}{suffix}.csv").write_text("\n".join(text))


def join_all(call, broker):
    call("shoal-fleet", "init", "owner", "--name", "clinic", "--broker", broker)
    (owner,) = [x.split()[1] for x in call("shoal-fleet", "show", "owner").splitlines() if x.startswith("owner ")]
    call("shoal-aggregator", "init", "server")
    call("shoal-fleet", "add-aggregator", "owner", "server/aggregator.card")
    call("shoal-aggregator", "join", "server", "owner/grants/aggregator.grant", "--owner", owner)
    for device in DEVICES:
        call("shoal-edge", "init", device, "--name", device)
        call("shoal-fleet", "add-device", "owner", f"{device}/{device}.card")
        call("shoal-edge", "join", device, f"owner/grants/{device}.grant", "--owner", owner)
    shutil.copy(call.home / "owner/roster.signed", call.home / "server")


@pytest.mark.long
def test_raw_tables_train(tmp_path, monkeypatch):
    """Raw tables train because the task standardises."""
    monkeypatch.chdir(tmp_path)
    call = Console(tmp_path)
    write_tables(tmp_path)
    (tmp_path / "broker").mkdir()
    with start_broker("mosquitto", tmp_path / "broker") as broker:
        join_all(call, broker.url)
        compiled = call(
            "shoal-fleet", "task", "compile", "owner", "logistic", "--features", "features.txt",
            "--label", "diagnosis", "--labels", "malignant,benign", "--out", "task",
        )  # fmt: skip
        assert "data: 30 named features, 2 named labels, standardise federated" in compiled
        call(
            "shoal-fleet",
            "run",
            "start",
            "owner",
            "--out",
            "server/runs/000001.run",
            "--task",
            "task",
            "--algorithm",
            "fedavg",
            "--rounds",
            5,
            "--local",
            "epochs=3",
        )
        programs = [call.start("shoal-aggregator", "serve", "server", "--once")]
        programs += [call.start("shoal-edge", "run", d, "--data", f"{d}.csv", "--once") for d in DEVICES]
        try:
            assert [program.wait(END_S) for program in programs] == [0] * 4
        finally:
            for program in programs:
                program.kill()
                program.wait()
    found = [json.loads(call("shoal-edge", "evaluate", d, f"{d}-held.csv", "--json"))["data"] for d in DEVICES]
    assert np.mean([one["accuracy"] for one in found]) >= 0.9
    assert all(one["accuracy"] > one["majority"]["accuracy"] and not one["no_better"] for one in found)
    assert {one["majority"]["label"] for one in found} == {"benign"}
    answers = call("shoal-edge", "predict", "dev-2", "--data", "dev-2-held.csv").split()
    assert set(answers) == {"malignant", "benign"}
