"""Reading a device's files, and the 60/20/20 split.

A watch over data files: it notices every change of a file, and bounds the bytes that are read again.
"""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from edge_client.learning import data
from edge_client.learning.data import Dataset, FilesSeen, load, permutation, split, split_growing, watch_of
from edge_client.learning.reading import Reading
from shoal.errors import DataError
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from tests.helpers.datafiles import idx
from tests.helpers.tasks import manifest, samples

TASK = manifest()
IMAGES = manifest(input=TensorSpec((1, 2, 2), "float32"), label=TensorSpec((), "int64", 10))


def write_idx(folder, n=6, suffix="", prefix="train-"):
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (n, 2, 2)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8)
    pack = gzip.compress if suffix else bytes
    (folder / f"{prefix}images-idx3-ubyte{suffix}").write_bytes(pack(idx(x)))
    (folder / f"{prefix}labels-idx1-ubyte{suffix}").write_bytes(pack(idx(y)))
    return x, y


def test_npz_is_cast_to_the_contract(tmp_path):
    """Npz is reshaped and cast to the contract."""
    x = np.arange(24, dtype=np.uint8).reshape(6, 4)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(6, dtype=np.uint8))
    batch = load(tmp_path / "d.npz", IMAGES)
    assert batch.x.shape == (6, 1, 2, 2)
    np.testing.assert_array_equal(batch.x.ravel(), np.arange(24))
    np.testing.assert_array_equal(batch.y, np.arange(6))
    assert (batch.x.dtype, batch.y.dtype) == (np.float32, np.int64)


def test_directory_is_read_in_name_order(tmp_path):
    """Of archives or of tables."""
    x, y = samples(9)
    np.savez(tmp_path / "b.npz", x=x[4:], y=y[4:])
    np.savez_compressed(tmp_path / "a.npz", x=x[:4], y=y[:4])
    np.testing.assert_array_equal(load(tmp_path, TASK).x, x)
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "b.csv").write_text("5,6,7,8,1\n")
    (tables / "a.csv").write_text("1;2;3;4;0\n")
    assert load(tables, TASK).x.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("whole_folder", [True, False])
def test_idx_is_scaled_to_one(tmp_path, suffix, whole_folder):
    write_idx(tmp_path, 4, suffix, prefix="t10k-")
    x, y = write_idx(tmp_path, 6, suffix)
    batch = load(tmp_path if whole_folder else tmp_path / f"train-images-idx3-ubyte{suffix}", IMAGES)
    np.testing.assert_allclose(batch.x.reshape(6, 2, 2), x / 255, rtol=1e-6)
    np.testing.assert_array_equal(batch.y, y)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3,4,0\n1,2,3,0\n", "line 2: 4 columns instead of 5"),
        ("a,b,c,d,e\n1,2,3,4,0\n1,2,x,4,0\n", "line 3, column 3: 'x' is not a number"),
        ("1,2,3,4,0\n1,2,nan,4,0\n", "line 2, column '3': the value is missing"),
        ("1,2,3,4,0\n1,2,inf,4,0\n", "line 2: the sample is not finite"),
        ("1,2,3,4,0\n1,2,1e300,4,0\n", "line 2: the sample is too large"),
        ("1,2,3,4,0\n1,2,3,4,3\n", r"line 2: the label is not in 0\.\.2"),
        ("1,2,3,4,0\n1,2,3,4,-1\n", r"line 2: the label is not in 0\.\.2"),
        ("1,2,3,4,0.5\n", "line 1: the label is not a whole number"),
        ("1,2,3,0\n", r"has shape \(3,\), the task expects \(4,\)"),
        ("a,b,c,d,e\n", "holds no sample"),
        ("", "holds no sample"),
        ("1\n2\n", "one column"),
    ],
)
def test_csv_errors_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load(path, TASK)
    assert "bad.csv" in str(caught.value)


def test_text_labels_of_archive_are_tasks(tmp_path):
    task = manifest(data=DataDeclaration(labels=("a", "b", "c")))
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 4)), y=np.array(["c", "a"]))
    assert load(tmp_path / "d.npz", task).y.tolist() == [2, 0]
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 4)), y=np.array(["c", "d"]))
    with pytest.raises(DataError, match=r"d\.npz, y, row 1: 'd' is no label of the task"):
        load(tmp_path / "d.npz", task)


def test_the_devices_options_reach_the_table(tmp_path):
    (tmp_path / "d.csv").write_text("y:a:b:c:d:e\n2:1:2:3:4:9\n")
    task = manifest(data=DataDeclaration(features=("a", "b", "c", "d")))
    assert load(tmp_path / "d.csv", task, Reading(label="y", separator=":")).y.tolist() == [2]


SYMBOLS = manifest(input=TensorSpec((4,), "int64", 50))


@pytest.mark.parametrize(
    ("arrays", "task", "message", "hint"),
    [
        ({"x": np.zeros((3, 4))}, TASK, "no array 'y'", ""),
        ({"x": np.zeros((3, 4)), "y": np.zeros(2)}, TASK, "3 samples but 2 labels", ""),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0)}, TASK, "no sample", ""),
        ({"x": np.zeros(()), "y": np.zeros(2)}, TASK, "first dimension", ""),
        (
            {"x": np.array([[1] * 4, [np.inf] * 4]), "y": np.zeros(2)},
            TASK,
            r"d\.npz, row 1: the sample is not finite",
            "",
        ),
        ({"x": np.full((2, 4), (1 << 24) + 1), "y": np.zeros(2)}, TASK, "row 0: the sample is an integer", ""),
        ({"x": np.zeros((2, 4), complex), "y": np.zeros(2)}, TASK, "must be numbers", ""),
        ({"x": np.array([["a"] * 4] * 2), "y": np.zeros(2)}, TASK, "must be numbers", ""),
        ({"x": np.array([{}] * 2, dtype=object), "y": np.zeros(2)}, TASK, "can't be read as an .npz", ""),
        (
            {"x": np.array([[1, 2, 3, 49], [0, 0, 50, 0]]), "y": np.zeros(2)},
            SYMBOLS,
            r"row 1: the sample is not in 0\.\.49",
            "",
        ),
        *(
            ({"x": np.zeros((5, 3), np.float32), "y": np.array(y)}, manifest(3, 2), message, hint)
            for y, message, hint in (
                ([1, 2, 1, 2, 2], r"labels go up to 2, and the task's from 0 to 1", "subtract 1 from all"),
                ([1, 3, 1, 2, 2], r"label is not in 0\.\.1", "fix or remove that row"),
                (["a", "b", "a", "b", "b"], "each label must be numbers", "--labels"),
            )
        ),
    ],
)
def test_npz_that_breaks_contract_is_refused(tmp_path, arrays, task, message, hint):
    np.savez(tmp_path / "d.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / "d.npz", task, Reading(skip_bad=0))
    assert hint in caught.value.hint


def test_foreign_files_are_refused(tmp_path):
    """Damaged and foreign files are refused."""
    for name, content, message in (
        ("a.npz", b"not a zip", "can't be read"),
        ("c.txt", b"x", "no known format"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03", "missing"),
        ("e.csv", b"\xff\xfe\x00", "can't be read as CSV"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load(path, TASK)
        path.unlink()
    with pytest.raises(DataError, match="holds no data file") as caught:
        load(tmp_path, TASK)
    assert ".npz" in caught.value.hint
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "none.npz", TASK)


@pytest.mark.parametrize("n", [5, 6, 7, 99, 100, 1797])
def test_split_is_a_partition_of_60_20_20(n):
    x = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
    shares = split(Dataset(x, np.arange(n)), b"seed")
    parts = [shares.train, shares.validation, shares.test]
    np.testing.assert_array_equal(np.sort(np.concatenate([p.y for p in parts])), np.arange(n))
    assert len(shares.validation) == len(shares.test) == n // 5
    for part in parts:
        assert len(part) >= 1
        np.testing.assert_array_equal(part.x, x[part.y])


def test_split_follows_the_seed():
    batch = Dataset(*samples(50))
    first, again, other = (split(batch, seed).train.x for seed in (b"a", b"a", b"b"))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_permutation_is_pinned():
    """Changing this moves every device's test samples into its training share."""
    assert permutation(10, b"shoal").tolist() == [3, 6, 8, 5, 2, 9, 7, 4, 1, 0]


@pytest.mark.parametrize("divide", [split, split_growing])
def test_four_samples_are_too_few(divide):
    with pytest.raises(DataError, match="4 samples are too few") as caught:
        divide(Dataset(*samples(4)), b"s")
    assert "5" in caught.value.hint


@pytest.mark.parametrize("n", [5, 9, 40, 103])
def test_samples_stay_in_their_shares(n):
    """Samples stay in their shares while the data grow."""
    x = np.arange(4 * 200, dtype=np.float32).reshape(200, 4)
    y = np.arange(200)
    before = split_growing(Dataset(x[:n], y[:n]), b"dev")
    after = split_growing(Dataset(x, y), b"dev")
    whole = n // 5 * 5
    assert len(before.validation) == len(before.test) == whole // 5
    assert sorted(np.concatenate([before.train.y, before.validation.y, before.test.y])) == list(range(whole))
    for name in ("train", "validation", "test"):
        mine = getattr(before, name)
        assert set(mine.y) == {v for v in getattr(after, name).y if v < whole}
        np.testing.assert_array_equal(mine.x, x[mine.y])
    assert set(after.test.y) != set(split_growing(Dataset(x, y), b"other").test.y)


def test_growth_and_replacement_are_noticed(tmp_path):
    """Growth new files and replacement are noticed."""
    path = tmp_path / "a.csv"
    path.write_text("1,2,0\n")
    look = watch_of(tmp_path)
    first = look()
    assert look() == first
    assert first.total_bytes == 6
    with path.open("a") as file:
        file.write("3,4,1\n")
    second = look()
    assert second != first
    (tmp_path / "b.csv").write_text("5,6,1\n")
    third = look()
    assert len(third.files) == 2
    os.utime(path, ns=(1, 1))
    assert look() != third


def test_images_are_looked_at_one_by_one(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"12345")
    look = watch_of(tmp_path)
    assert look().total_bytes == 5
    (tmp_path / "cat" / "2.png").write_bytes(b"12")
    assert look().total_bytes == 7


def test_data_that_are_gone_are_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        watch_of(tmp_path / "none.csv")()


def test_bytes_read_again_are_bounded(monkeypatch):
    """The bytes that are read again are bounded."""
    monkeypatch.setattr(data, "MAX_WATCHED_BYTES", 9)
    FilesSeen((("a", 4, 0), ("b", 5, 0))).check_size()
    with pytest.raises(DataError, match="have grown to 10 bytes, more than the 9 that are read again") as caught:
        FilesSeen((("a", 10, 0),)).check_size()
    assert "restart" in caught.value.hint
