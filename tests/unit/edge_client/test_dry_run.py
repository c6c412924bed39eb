"""A dry run of samples against a task: what was read, left out and doubted, for people and programs."""

import json

import numpy as np
import pytest

from edge_client.dry_run import MOST_SHOWN, dry_run
from edge_client.learning.reading import AS_FOUND
from shoal.errors import DataError
from shoal.owner.cli.main import check
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from tests.helpers.tasks import logistic_bundle, manifest, samples

TABLE = DataDeclaration(
    features=("temp", "hum"), label="state", labels=("ok", "bad", "off"), missing="mean", standardise="local"
)
ROWS = [f"{i},{20 + i},{'' if i == 4 else 1.5 * i},{('ok', 'BAD')[i % 2]}" for i in range(9)]


def table(path, *more):
    path.write_text("\n".join(["id,temp,hum,state", *ROWS, *more]) + "\n")
    return path


def test_a_table(tmp_path):
    found = dry_run(table(tmp_path / "d.csv", "9,29"), manifest(2, 3, data=TABLE), AS_FOUND)
    assert (found.shares, found.classes, found.unused) == ((7, 1, 1), {"ok": 5, "bad": 4, "off": 0}, ("id",))
    assert [str(column) for column in found.columns] == ["temp: 20 to 28", "hum: 0 to 12, missing: 1"]
    assert found.left_out.count == 1
    assert found.document()["columns"][1] == {"name": "hum", "least": 0.0, "most": 12.0, "missing": 1}
    lines = found.lines()
    assert lines[0] == f"{tmp_path}/d.csv: 9 samples (7 to train, 1 to validate, 1 to test)"
    assert lines[3:5] == ["  labels: ok 5, bad 4, off 0", "  not read: id"]
    assert "line 11: 2 columns instead of 4" in lines[5]


def test_numbers_and_many_columns(tmp_path):
    """Columns without names are one range if they are many; a regression has the range of its targets."""
    x = np.random.default_rng(0).standard_normal((10, MOST_SHOWN + 1)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(10))
    found = dry_run(tmp_path / "d.npz", manifest(MOST_SHOWN + 1, 10), AS_FOUND)
    assert [column.name for column in found.columns] == ["all 65 values"]
    assert found.columns[0].least == x.min()
    assert found.classes == {str(i): 1 for i in range(10)}
    number = manifest(MOST_SHOWN + 1, 1, kind="regression", label=TensorSpec((), "float32"))
    np.savez(tmp_path / "d.npz", x=x, y=np.linspace(-1, 1, 10, dtype=np.float32))
    found = dry_run(tmp_path / "d.npz", number, AS_FOUND)
    assert (str(found.target), found.classes) == ("to predict: -1 to 1", {})


def test_too_few_samples_do_not_fit(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, np.int64))
    with pytest.raises(DataError, match="4 samples are too few"):
        dry_run(tmp_path / "d.npz", manifest(3, 2), AS_FOUND)


def test_the_command_tries_each_file(tmp_path, capsys):
    x, y = samples(20, 4, 3)
    np.savez(tmp_path / "good.npz", x=x, y=y)
    np.savez(tmp_path / "bad.npz", x=x[:, 1:], y=y)
    logistic_bundle(4, 3).to_dir(tmp_path / "task")
    check(tmp_path / "task" / "task.toml", [tmp_path / "good.npz"])
    assert "good.npz: 20 samples (12 to train" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        check(tmp_path / "task", [tmp_path / "bad.npz", tmp_path / "good.npz"], json=True)
    assert ended.value.code == 1
    said = json.loads(capsys.readouterr().out)["data"]["data"]
    assert [each["fits"] for each in said] == [False, True]
    assert (said[0]["hint"], said[1]["shares"]) == ("check that this data belongs to this task", [12, 4, 4])
