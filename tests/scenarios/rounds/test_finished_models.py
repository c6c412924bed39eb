"""Two runs in a row: the model of the finished run answers until a later run ends with one that is no worse."""

import errno
import json

import numpy as np
import pytest

import edge_client.storage.finished_models
from edge_client import cli
from edge_client.answers import inference as answers
from edge_client.learning.data import Dataset
from edge_client.storage.finished_models import FinishedModels
from shoal.errors import ConfigError, StorageError
from shoal.protocol.recipe import LocalTraining
from shoal.util.console import run_program
from shoal.util.files import write_failed
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    begin_run,
    grouped_data,
    make_fleet,
    restart_device,
    thetas,
)
from tests.helpers.tasks import logistic_bundle

LEARN_NOTHING = LocalTraining(epochs=0, steps=1, batch_size=0, lr=1e-6)
NAME = "dev-00"


@pytest.fixture
def fleet(tmp_path):
    """A fleet whose first run has finished with a useful model."""
    with make_fleet(tmp_path / "fleet", rounds=4) as made:
        made.run(100)
        made.settle()
        yield made


@pytest.fixture
def source(tmp_path):
    np.savez(tmp_path / "x.npz", x=grouped_data(3)[NAME].x)
    return tmp_path / "x.npz"


def train_a_round(fleet):
    """Go on until the first round of the run is closed and the device has saved the model under way."""
    fleet.run_until(lambda: fleet.closed() == 1, 100)
    for device in fleet.devices.values():
        device.runtime._results.save_model(fleet.now_s, durable=False)


def finish(fleet):
    fleet.run(100)
    fleet.settle()


def store(fleet, name=NAME):
    return FinishedModels(fleet.stage.device_dir(name))


def run_in_use(fleet):
    return answers.choose(fleet.stage.device_dir(NAME)).own.run


def test_rollback_holds_until_a_run_finishes(fleet):
    """A better model takes over when its run ends; a rollback takes effect beside the running device."""
    begin_run(fleet, local=LocalTraining(epochs=0, steps=40, batch_size=0, lr=1.0), rounds=4)
    train_a_round(fleet)
    assert run_in_use(fleet) == 1
    finish(fleet)
    first, second = store(fleet).models()
    assert second.validation.accuracy >= first.validation.accuracy
    assert run_in_use(fleet) == 2
    chosen = answers.choose(fleet.stage.device_dir(NAME))
    assert (chosen.own.round, chosen.live) == (5, False)
    assert chosen.own.theta.tobytes() == thetas(fleet)[NAME]
    assert store(fleet).rollback(None).run == 1
    assert run_in_use(fleet) == 1
    with pytest.raises(ConfigError, match="no finished model older than run 1's: it has runs 2, 1"):
        store(fleet).rollback(None)
    begin_run(fleet, local=LEARN_NOTHING, seed=6)
    train_a_round(fleet)
    assert run_in_use(fleet) == 1
    finish(fleet)
    assert run_in_use(fleet) == 2
    assert not store(fleet).standing().pinned


def test_unfinished_run_leaves_no_model(fleet):
    """No finished model is of a run that another replaced."""
    begin_run(fleet)
    train_a_round(fleet)
    begin_run(fleet, seed=6)
    finish(fleet)
    assert [m.run for m in store(fleet).models()] == [1, 3]


def test_finished_model_answers_meanwhile(fleet, source):
    """Fault B3: with one model.bin, predictions fell to chance as soon as an untrained run began."""
    folder = fleet.stage.device_dir(NAME)
    first = answers.choose(folder).predict(source)
    truth = grouped_data(3)[NAME].y
    assert (first == truth).mean() > 0.6
    begin_run(fleet, local=LEARN_NOTHING)
    train_a_round(fleet)
    assert fleet.model(NAME).run == 2
    assert np.array_equal(answers.choose(folder).predict(source), first)
    live = answers.choose(folder, live=True).predict(source)
    assert (live == truth).mean() < (first == truth).mean()
    finish(fleet)
    assert [m.run for m in store(fleet).models()] == [1, 2]
    assert run_in_use(fleet) == 1, "the worse model does not take over"


def test_model_answers_with_its_own_task(fleet, source):
    """The next task's model has another length: only the stored task of run 1 can use run 1's model."""
    folder = fleet.stage.device_dir(NAME)
    first = answers.choose(folder).predict(source)
    begin_run(fleet, bundle=logistic_bundle(INPUTS, CLASSES + 2))
    train_a_round(fleet)
    assert np.array_equal(answers.choose(folder).predict(source), first)
    finish(fleet)
    assert run_in_use(fleet) == 2
    store(fleet).rollback(1)
    assert np.array_equal(answers.choose(folder).predict(source), first)


def test_last_three_models_stay(fleet):
    """The last three models stay and nothing else."""
    for seed in (5, 6, 7):
        begin_run(fleet, seed=seed)
        finish(fleet)
    models = store(fleet).models()
    assert [m.run for m in models] == [2, 3, 4]
    files = sorted(p.name for p in (fleet.stage.device_dir(NAME) / "finished").iterdir())
    expected = {f"model-{m.own.file.hex()}.bin" for m in models} | {f"task-{m.task.hex()}.bin" for m in models}
    expected |= {f"start-{m.run_id.hex()}.bin" for m in models}
    assert files == sorted(expected | {"list.bin"})
    assert len(expected) == 7


def test_earlier_models_are_measured_again(fleet):
    """The figures of two runs can be compared only if they are of the same samples."""
    before = store(fleet).models()[0].validation
    old = grouped_data(3)[NAME]
    restart_device(fleet, NAME, Dataset(old.x, (old.y + 1) % CLASSES))
    begin_run(fleet)
    finish(fleet)
    after = store(fleet).models()[0]
    assert after.run == 1
    assert after.validation.accuracy < before.accuracy


def test_absent_device_records_final_model(tmp_path):
    """A device that was away at the end records the final model."""
    with make_fleet(tmp_path / "fleet", quorum=0.6, deadline_s=5.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == 3, 100)
        fleet.kill_device(NAME)
        finish(fleet)
        assert store(fleet).models() == ()
        fleet.revive_device(NAME)
        fleet.run_until(lambda: bool(store(fleet).models()), 1000)
        (model,) = store(fleet).models()
        assert (model.run, model.round) == (1, 4)


def test_unlisted_final_model_is_fetched(tmp_path):
    """An update may have been sent by a version that has no list."""
    with make_fleet(tmp_path / "fleet", quorum=1.0) as fleet:
        finish(fleet)
        fleet.kill_device(NAME)
        (fleet.stage.device_dir(NAME) / "finished" / "list.bin").unlink()
        fleet.revive_device(NAME)
        fleet.run_until(lambda: bool(store(fleet).models()), 1000)
        assert store(fleet).models()[0].own == store(fleet, "dev-01").models()[0].own


def test_full_disk_at_the_end_is_an_error(tmp_path, monkeypatch):
    """A full disk at the end of a run raises the error of every other write."""
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run_until(lambda: fleet.closed() == 3, 100)
        real = edge_client.storage.finished_models.write_atomic

        def full(path, *pieces, **options):
            raise write_failed(path, OSError(errno.ENOSPC, "No space left on device"))

        monkeypatch.setattr(edge_client.storage.finished_models, "write_atomic", full)
        with pytest.raises(StorageError, match="No space left") as caught:
            fleet.run(100)
        assert caught.value.exit_code == 9
        monkeypatch.setattr(edge_client.storage.finished_models, "write_atomic", real)
        assert store(fleet).models() == ()


def test_path_models_answer_in_the_next_run(tmp_path):
    """`--node` and `--ensemble` work on the finished models too."""
    source = tmp_path / "x.npz"
    np.savez(source, x=grouped_data(8, 2)[NAME].x)
    cfl = {"algorithm": "cfl", "rounds": 8, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), settings={"path": "on"}, **cfl) as fleet:
        finish(fleet)
        folder = fleet.stage.device_dir(NAME)
        chosen = answers.choose(folder)
        before = [chosen.predict(source, node=0), chosen.predict(source, ensemble=True)]
        begin_run(fleet, local=LEARN_NOTHING)
        finish(fleet)
        store(fleet).rollback(1)
        chosen = answers.choose(folder)
        assert np.array_equal(before, [chosen.predict(source, node=0), chosen.predict(source, ensemble=True)])


def test_command_line_names_run_that_answers(fleet, source, tmp_path, capsys, monkeypatch):
    folder = str(fleet.stage.device_dir(NAME))

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["shoal-edge", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_program(cli.app, prog="shoal-edge")
        assert not ended.value.code
        return capsys.readouterr()

    def which(*options):
        said = call("predict", folder, "--data", str(source), "--json", *options)
        data = json.loads(said.out)["data"]
        return data["run"], data["round"], data["live"], said.err

    begin_run(fleet, local=LEARN_NOTHING)
    train_a_round(fleet)
    assert which() == (1, 5, False, "")
    assert which("--live") == (2, 2, True, "")
    written = call("export", folder, str(tmp_path / "m.onnx"), "--json").out
    assert json.loads(written)["data"] == {
        "file": str(tmp_path / "m.onnx"),
        "run": 1,
        "round": 5,
        "cluster": 0,
        "live": False,
        "choice": "cluster",
    }
    said = call("export", folder, str(tmp_path / "live.onnx"), "--live").out
    assert "cluster 0 of run 2, round 2" in said


def test_live_model_answers_with_a_note(tmp_path, source, capsys, monkeypatch):
    """Before the first end the live model answers with a note."""
    with make_fleet(tmp_path / "fleet") as fleet:
        train_a_round(fleet)
        folder = str(fleet.stage.device_dir(NAME))
        monkeypatch.setattr("sys.argv", ["shoal-edge", "predict", folder, "--data", str(source), "--json"])
        with pytest.raises(SystemExit):
            run_program(cli.app, prog="shoal-edge")
        said = capsys.readouterr()
        assert "no run has finished on this device yet: this is the model of run 1 under way, round 2" in said.err
        assert json.loads(said.out)["data"]["live"] is True
