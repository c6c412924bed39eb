"""Tasks for devices' own training code, from files of initial values."""

import numpy as np
import pytest

from crypto.seal.identity import Identity
from shoal.errors import ConfigError, TaskError, UsageError
from shoal.owner.task_compiler.external import ORIGINS_FILE, external_task, read_origins
from shoal.owner.task_compiler.signed import Source, read_signed, write_signed
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TrainerName

VALUES = {"mean": np.float64(7), "weight": np.arange(6.0).reshape(2, 3), "head": np.zeros(3, np.float32)}
OWNER = Identity.generate("owner")


def layout(path, **changes):
    np.savez(path, **(VALUES | changes))
    return path


def task(source, trainer="own:1", **changes):
    options = {"name": "task", "sample": "2", "classes": 3, "data": DataDeclaration()}
    return external_task(source, trainer, **(options | changes))


def test_private_parameters_come_last(tmp_path):
    bundle, origins = task(layout(tmp_path / "a.npz"), private=["mean"], shared=["weight"])
    found = [(p.name, p.shape, p.segment) for p in bundle.manifest.parameters]
    assert found == [("weight", (2, 3), "shared"), ("head", (3,), "cluster"), ("mean", (), "private")]
    assert np.frombuffer(bundle.private, "<f4") == 7
    assert origins.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0]]
    assert bundle.manifest.trainer == TrainerName("own", "1")
    assert TaskBundle.from_bytes(bundle.to_bytes()) == bundle


@pytest.mark.parametrize(
    ("changes", "kind", "sample", "label"),
    [
        ({}, "classification", ((2,), "float32", 0), ((), "int64", 3)),
        ({"sample": "3x8x8", "classes": 0}, "regression", ((3, 8, 8), "float32", 0), ((), "float32", 0)),
        ({"classes": 0, "answer": "5"}, "regression", ((2,), "float32", 0), ((5,), "float32", 0)),
        ({"sample": "20:5000", "answer": "20"}, "sequence", ((20,), "int64", 5000), ((20,), "int64", 3)),
        (
            {"sample": "", "classes": 0, "data": DataDeclaration(features=("a", "b"), labels=("x", "y"))},
            "classification",
            ((2,), "float32", 0),
            ((), "int64", 2),
        ),
    ],
)
def test_shapes_make_the_kind_of_task(tmp_path, changes, kind, sample, label):
    made = task(layout(tmp_path / "a.npz"), **changes)[0].manifest
    found = [(spec.shape, spec.dtype, spec.limit) for spec in (made.input, made.label)]
    assert (made.kind, *found) == (kind, sample, label)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"private": ["nothing"]}, "no parameter begins with 'nothing'"),
        ({"sample": "2y3"}, "'2y3' is no shape"),
        ({"sample": ""}, "'0' is no shape"),
        ({"sample": "0x4"}, "has shape"),
        ({"trainer": "own"}, "a trainer's version '' is not valid"),
        ({"trainer": "two words:1"}, "a trainer's name 'two words' is not valid"),
        ({"private": ["mean", "weight", "head"]}, "every parameter of the task is private"),
    ],
)
def test_unfit_descriptions_are_refused(tmp_path, changes, words):
    with pytest.raises(TaskError, match=words):
        task(layout(tmp_path / "a.npz"), **changes)


def test_other_files_are_refused(tmp_path):
    for name, data in (("text", b"weights"), ("zip", b"PK\3\4junk"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TaskError, match="is no layout"):
            task(tmp_path / name)
    np.savez(tmp_path / "objects.npz", a=np.array([{}], object))
    with pytest.raises(TaskError, match="is no layout"):
        task(tmp_path / "objects.npz")
    with pytest.raises(TaskError, match="not finite"):
        task(layout(tmp_path / "nan.npz", head=np.full(3, np.nan)))
    with pytest.raises(ConfigError, match="missing"):
        task(tmp_path / "missing.npz")


def test_a_folder_has_a_starting_model_each(tmp_path):
    folder = tmp_path / "layouts"
    folder.mkdir()
    with pytest.raises(TaskError, match="holds no layout"):
        task(folder)
    for number in range(3):
        layout(folder / f"{number}.npz", head=np.full(3, number))
    bundle, origins = task(folder, private=["mean"])
    assert origins[:, -1].tolist() == [0, 1, 2]
    write_signed(bundle, Source("own:1", {}), OWNER, tmp_path / "task", origins.astype("<f4").tobytes())
    assert read_signed(tmp_path / "task", OWNER)[0] == bundle
    np.testing.assert_array_equal(read_origins(tmp_path / "task", bundle, 2), origins[:2])
    with pytest.raises(UsageError, match="begins with 4 models, and the task has initial values for 3"):
        read_origins(tmp_path / "task", bundle, 4)
    layout(folder / "4.npz", head=np.zeros(4))
    with pytest.raises(TaskError, match="other names or shapes"):
        task(folder)


def test_damaged_starting_models_are_refused(tmp_path):
    bundle, _ = task(layout(tmp_path / "a.npz"), private=["mean"])
    (tmp_path / ORIGINS_FILE).write_bytes(bytes(7))
    with pytest.raises(TaskError, match="does not hold the task's parameters"):
        read_origins(tmp_path, bundle, 1)
