"""Programs answer with the model in use while 50 runs replace it: each answer is of one model, and the last of the newest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from edge_client.answers.loaded_model import LoadedModel
from edge_client.answers.model_in_use import publish
from edge_client.status import status, status_lines
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.fleets import grouped_data
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.models_in_use import NAMED, TASK, finish
from tests.helpers.tasks import logistic_bundle
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

RUNS = 50
LIMIT_S = 120.0
EXAMPLE = ROOT / "docs" / "examples" / "model_in_use.cpp"
HEADER = "onnxruntime_cxx_api.h"
PLACES = ("/usr/include/onnxruntime", "/usr/local/include/onnxruntime", "/usr/include", "/usr/local/include")
PYTHON = """
import sys
import shoal

model = shoal.load(sys.argv[1])
for line in sys.stdin:
    model.reload_if_new()
    sample = [float(word) for word in line.split()]
    print(model.predict(sample), model.probabilities(sample).max(), model.facts["run"], flush=True)
"""

pytestmark = pytest.mark.process


def include_folder():
    """Return a folder with ONNX Runtime's headers; None if there is none."""
    folders = (*os.environ.get("CPLUS_INCLUDE_PATH", "").split(":"), *PLACES)
    return next((folder for folder in folders if folder and Path(folder, HEADER).exists()), None)


def of_python(_folder, directory):
    """Return the command of a program in Python."""
    return [sys.executable, "-c", PYTHON, str(directory)]


def of_cpp(folder, directory):
    """Return the command of the C++ example, compiled for the library of the wheel."""
    headers = include_folder()
    if headers is None or shutil.which("g++") is None:
        pytest.skip(f"{HEADER} is not installed: apt install g++ libonnxruntime-dev")
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    program = folder / "answer"
    (folder / "libonnxruntime.so.1").symlink_to(library)  # the name that programs look for
    words = ["g++", "-std=c++17", f"-I{headers}", str(EXAMPLE), str(library), f"-Wl,-rpath,{folder}", "-o"]
    subprocess.run([*words, str(program)], check=True, capture_output=True)
    return [str(program), str(directory / "model.onnx")]


@pytest.mark.parametrize("program", [of_python, of_cpp])
def test_each_answer_is_of_one_model(tmp_path, program):
    """A program is asked all the time while models follow each other; before each model it has answered at least once."""
    directory = tmp_path / "device"
    finish(directory, 1)
    publish(directory)
    command = program(tmp_path, directory)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        answers = []

        def ask():
            process.stdin.write("1 2 3 4\n")
            process.stdin.flush()

        ask()
        for run in range(2, RUNS + 2):
            answers.append(process.stdout.readline().split())
            ask()  # while it answers, the next model takes its place
            finish(directory, run)
            publish(directory)
        answers.append(process.stdout.readline().split())
        ask()
        answers.append(process.stdout.readline().split())
        process.stdin.close()
        assert process.wait(30) == 0
    runs = [int(run) for _, _, run in answers]
    assert [label for label, _, _ in answers] == [NAMED.labels[run % 3] for run in runs]
    assert runs == sorted(runs)
    assert (runs[0], runs[-1]) == (1, RUNS + 1)
    assert len(set(runs)) > RUNS // 2


@pytest.mark.broker
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_real_devices_run_the_program(tmp_path):
    """One device's program notes its calls and fails: two runs go on with all devices, and status says that it failed."""
    data = grouped_data(2, inputs=4, classes=3)
    notes, program = tmp_path / "notes", tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$3 $(cat $2 | grep -c sha256) $(env | grep -c SHOAL)" >> {notes}\nexit 3\n')
    program.chmod(0o755)
    (tmp_path / "broker").mkdir()
    recipe = Recipe("fedavg", local=LocalTraining(lr=0.5), min_contributors=2, quorum=1.0, deadline_s=60.0, rounds=1)
    with (
        start_broker("mosquitto", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "s", broker.url, tuple(data)) as stage,
    ):
        stage.start_aggregator()
        names, directory = tuple(data), stage.device_dir(next(iter(data)))
        for name, more in zip(names, (("--on-model", str(program)), ()), strict=True):
            np.savez(tmp_path / f"{name}.npz", x=data[name].x, y=data[name].y)
            stage.start_device(name, tmp_path / f"{name}.npz", *more)
        # Another task each time: the newest model answers, whatever the older one's accuracy is.
        for run, task in enumerate((TASK, logistic_bundle(name="later", data=NAMED)), 1):
            added = stage.add_run(task, np.zeros((1, task.length), np.float32), recipe).run
            until(lambda run=added: stage.finished(run), f"the end of run {added}", LIMIT_S)
            assert [record["contributed"] for record in stage.records(added)] == [2, 2]
            until(lambda run=run: status(directory, check=False).get("on_model", {}).get("run") == str(run), "its call")
            assert LoadedModel(directory).facts["run"] == str(run)
        failed = status(directory, check=False)
    assert failed["on_model"]["error"] == f"{program} ended with status 3"
    assert any("failed" in line and "status 3" in line for line in status_lines(failed))
    calls = [line.split() for line in notes.read_text().splitlines()]
    assert {run for run, _, _ in calls} == {"1", "2"}
    assert {(digests, secrets) for _, digests, secrets in calls} == {("1", "0")}
