"""Damaged samples of every format are left out if they are few, counted, and the same at each start; more are refused."""

import gzip

import numpy as np
import pytest

from edge_client.learning.data import load, load_inputs, split_growing, watch_of
from edge_client.learning.reading import Reading
from shoal.errors import ConfigError, DataError
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from tests.helpers.tasks import manifest

NAMED = manifest(data=DataDeclaration(features=("a", "b", "c", "d"), label="state", labels=("ok", "bad", "gone")))
NUMBERED = manifest()
HEAD = "a,b,c,d,state\n"


def lines(count, label="ok"):
    return "".join(f"{i},{i}.5,-1,4,{label}\n" for i in range(count))


def table(path, text, name="d.csv"):
    (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path / name


TAILS = {
    "cut after a cell": (b"20.1,4", 1),
    "cut in the label": (b"20.1,4,1,2,o", 1),
    "cut before the label": (b"20.1,4,1,2,", 1),
    "zero bytes": (bytes(64), 1),
    "a page of zero bytes": (bytes(4096), 1),
    "more zero bytes than a cell may have": (bytes(200_000), 1),
    "cut and zero bytes": (b"20.1,4" + bytes(64), 1),
    "zero bytes and a restart": (bytes(64) + b"1,2,3,4,ok\n1,2,3,4,bad\n", 1),
    "bytes that are no text": (b"1,2,\xff\xfe\x80,4,ok\n", 1),
    "no number": (b"1,2,three,4,ok\n", 1),
    "not finite": (b"1,2,inf,4,ok\n", 1),
    "too large": (b"1,2,1e300,4,ok\n", 1),
    "a missing value": (b"1,2,,4,ok\n", 1),
    "an unknown label": (b"1,2,3,4,maybe\n", 1),
    "no label": (b"1,2,3,4,\n", 1),
    "a second header": (HEAD.encode(), 1),
    "three kinds": (b"1,2,x,4,ok\n1,2,3,4,maybe\n20.1,4", 3),
    "a quote that is never closed": (b'1,2,3,"4\n1,2,3,4,ok\n', 2),
}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("case", TAILS)
def test_damaged_lines_are_counted(tmp_path, case, separator):
    """Damaged lines are left out and counted."""
    tail, damaged = TAILS[case]
    whole = HEAD + lines(8)
    text = (whole.encode() + tail).replace(b",", separator.encode())
    found = load(table(tmp_path, text), NAMED)
    extra = 1 if "restart" in case else 0
    assert (len(found), found.left_out.count, found.left_out.samples) == (8 + extra, damaged, 8 + extra + damaged)
    assert "d.csv, line" in found.left_out.first
    again = load(tmp_path / "d.csv", NAMED)
    assert again.x.tobytes() + again.y.tobytes() == found.x.tobytes() + found.y.tobytes()
    with pytest.raises(DataError, match=r"d\.csv, line"):
        load(tmp_path / "d.csv", NAMED, Reading(skip_bad=0))
    if "label" not in case:
        with pytest.raises(DataError, match=r"d\.csv"):
            load_inputs(tmp_path / "d.csv", NAMED)  # answers to samples must not shift


@pytest.mark.parametrize(
    ("whole", "damaged", "skip_bad", "taken"),
    [
        (100, 3, None, True),
        (100, 4, None, False),
        (396, 4, None, True),
        (396, 5, None, False),
        (100, 4, 4, True),
        (100, 1, 0, False),
        (3, 3, None, False),
        (3, 3, 3, True),
        (4, 3, None, True),
        (0, 2, 2, False),
    ],
)
def test_how_many_are_left_out(tmp_path, whole, damaged, skip_bad, taken):
    """The larger of 3 samples and 1 %, but fewer than the whole ones, or as many as the operator says; never all."""
    path = table(tmp_path, HEAD + lines(whole) + lines(damaged, "maybe"))
    reading = Reading(skip_bad=skip_bad)
    if taken:
        assert len(load(path, NAMED, reading)) == whole
        return
    with pytest.raises(
        DataError, match=rf"d\.csv, line {whole + 2}, column 5: 'maybe' is no label of the task"
    ) as caught:
        load(path, NAMED, reading)
    if skip_bad != 0:
        assert f"(damaged samples: {damaged} of {whole + damaged})" in str(caught.value)
        assert ("skip_bad" in caught.value.hint) is (whole > 0)
    assert "labels: ok, bad, gone" in caught.value.hint


def test_wrong_column_is_refused_as_before(tmp_path):
    """A column that is wrong everywhere is refused as before."""
    path = table(tmp_path, HEAD + lines(50).replace(".5", ".5C"))
    with pytest.raises(
        DataError, match=r"d\.csv, line 2, column 2: '0\.5C' is not a number \(damaged samples: 50 of 50\)"
    ):
        load(path, NAMED)
    latin = table(tmp_path, "größe,b,c,d,state\n".encode("latin-1") + lines(9).encode(), "l.csv")
    with pytest.raises(DataError, match=r"l\.csv can't be read as CSV: 'utf-8' codec can't decode byte") as caught:
        load(latin, NAMED)
    assert caught.value.hint == "save it as UTF-8"


def test_line_in_writing_is_no_sample(tmp_path):
    """With --watch: half a number is a number too, and would be taken for the sample's."""
    path = table(tmp_path, "state,a,b,c,d\n" + "ok,1,2,3,4\n" * 12 + "ok,5,6,7,8")
    whole, growing = load(path, NAMED), load(path, NAMED, Reading(growing=True))
    assert (len(whole), len(growing), growing.left_out.count) == (13, 12, 0)
    look = watch_of(path)
    before = look()
    with path.open("a") as file:
        file.write(".25\nok,1,2,3,4\nok,1,2,3,4\n")
    assert look() != before
    later = load(path, NAMED, Reading(growing=True))
    assert later.x[12].tolist() == [5, 6, 7, 8.25]
    shares, grown = split_growing(growing, b"seed"), split_growing(later, b"seed")
    assert grown.test.x[: len(shares.test)].tolist() == shares.test.x.tolist()


def test_samples_stay_beside_damaged_ones(tmp_path):
    """Samples stay in their share beside a damaged one."""
    path = table(tmp_path, HEAD + lines(6) + "1,2,x,4,ok\n" + lines(6, "bad"))
    before = split_growing(load(path, NAMED, Reading(growing=True)), b"seed")
    with path.open("a") as file:
        file.write(lines(20))
    after = split_growing(load(path, NAMED, Reading(growing=True)), b"seed")
    for share in ("train", "validation", "test"):
        old, new = getattr(before, share), getattr(after, share)
        assert new.x[: len(old)].tolist() == old.x.tolist()


ROWS = {
    "nan": ("x", (3, 1), np.nan),
    "infinite": ("x", (3, 1), np.inf),
    "too large": ("x", (3, 1), 1e300),
    "no class": ("y", 3, 7),
    "no label": ("y", 3, np.nan),
    "half a label": ("y", 3, 0.5),
}


@pytest.mark.parametrize("case", ROWS)
def test_damaged_rows_are_left_out(tmp_path, case):
    """Damaged rows of an archive are left out."""
    x, y = np.arange(36.0).reshape(9, 4), np.zeros(9)
    name, at, value = ROWS[case]
    {"x": x, "y": y}[name][at] = value
    np.savez(tmp_path / "d.npz", x=x, y=y)
    found = load(tmp_path / "d.npz", NUMBERED)
    assert (len(found), found.left_out.count, found.left_out.samples) == (8, 1, 9)
    assert found.left_out.first.startswith(f"{tmp_path / 'd.npz'}, row 3")
    assert found.x[:, 0].tolist() == [0, 4, 8, 16, 20, 24, 28, 32]


def test_two_faults_of_a_row_count_once(tmp_path):
    """Text labels and two faults of one row count once."""
    x, y = np.ones((9, 4)), np.array(["ok"] * 8 + ["maybe"])
    x[8, 0] = np.nan
    np.savez(tmp_path / "d.npz", x=x, y=y)
    assert load(tmp_path / "d.npz", NAMED).left_out.count == 1


def test_labels_of_no_class_are_left_out(tmp_path):
    """Labels of no class in idx files are left out."""
    task = manifest(input=TensorSpec((1, 2, 2), "float32"))
    images, labels = np.zeros((9, 2, 2), np.uint8), np.zeros(9, np.uint8)
    labels[4] = 200
    for name, values in (("train-images-idx3-ubyte.gz", images), ("train-labels-idx1-ubyte.gz", labels)):
        sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
        (tmp_path / name).write_bytes(gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()))
    assert load(tmp_path, task).left_out.count == 1


def test_foreign_and_empty_files_are_ignored(tmp_path):
    """Also a table of which only the header has been written; the damage of all files counts together."""
    table(tmp_path, HEAD + lines(9), "a.csv")
    table(tmp_path, bytes([0, 5, 22, 7]), "._a.csv")
    table(tmp_path, b"", "b.csv")
    table(tmp_path, HEAD, "c.csv")
    table(tmp_path, bytes(64), "d.csv")
    table(tmp_path, HEAD + "1,2,x,4,ok\n", "e.csv")
    found = load(tmp_path, NAMED)
    assert (len(found), found.left_out.count) == (9, 2)
    assert len(load_inputs(table(tmp_path, HEAD + lines(2), "z.csv"), NAMED)) == 2
    with pytest.raises(DataError, match="holds no sample"):
        load(tmp_path / "b.csv", NAMED)


def test_damaged_images_are_left_out(tmp_path):
    image = pytest.importorskip("PIL.Image")
    task = manifest(input=TensorSpec((1, 8, 8), "float32"), data=DataDeclaration(labels=("cat", "dog", "gnu")))
    for folder in ("cat", "dog", ".thumbnails"):
        (tmp_path / folder).mkdir()
        for i in range(5):
            image.fromarray(np.full((8, 8), 10 * i, np.uint8)).save(tmp_path / folder / f"{i}.jpg")
    (tmp_path / "cat" / "._0.jpg").write_bytes(bytes([0, 5, 22, 7]))
    (tmp_path / "cat" / "9.jpg").write_bytes(b"")
    whole = (tmp_path / "cat" / "2.jpg").read_bytes()
    (tmp_path / "cat" / "2.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "dog" / "3.jpg").write_bytes(b"\0" * 500)
    (tmp_path / "emu").mkdir()
    (tmp_path / "emu" / "0.jpg").write_bytes(whole)
    found = load(tmp_path, task)
    assert (found.y.tolist(), found.left_out.count) == ([0] * 4 + [1] * 4, 3)
    assert "2.jpg can't be read as an image" in found.left_out.first
    with pytest.raises(DataError, match=r"2\.jpg can't be read as an image.*damaged samples: 3 of 11") as caught:
        load(tmp_path, task, Reading(skip_bad=2))
    assert "skip_bad = 3" in caught.value.hint


def test_the_option_is_no_negative_number():
    with pytest.raises(ConfigError, match="skip_bad"):
        Reading(skip_bad=-1)
