"""The readers of data formats: what is in a file, and files that are damaged, hostile or of another kind."""

from __future__ import annotations

import gzip
import io
import os
import zipfile

import numpy as np
import pytest

from edge_client.learning import data_files
from edge_client.learning.data_files import Raw, read_idx, read_npz
from shoal.errors import DataError
from tests.helpers.datafiles import idx

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def write_idx(folder, n=6, suffix="", labels_suffix=None):
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (n, 2, 2)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8)
    for name, array, end in ((IMAGES, x, suffix), (LABELS, y, suffix if labels_suffix is None else labels_suffix)):
        data = idx(array)
        (folder / f"{name}{end}").write_bytes(gzip.compress(data) if end else data)
    return x, y


# ------------------------------------------------------------------------------------------------------------ npz


def test_arrays_are_returned_as_they_are(tmp_path):
    """The arrays of an archive are returned as they are."""
    x, y = np.arange(6, dtype=np.int16).reshape(3, 2), np.array([1.5, 2, 3])
    np.savez(tmp_path / "d.npz", x=x, y=y, other=np.zeros(9))
    raw = read_npz(tmp_path / "d.npz")
    assert (raw.x.dtype, raw.y.dtype, raw.origin) == (np.int16, np.float64, tmp_path / "d.npz")
    np.testing.assert_array_equal(raw.x, x)
    np.testing.assert_array_equal(raw.y, y)
    assert raw.row_name(2) == "row 2"


def test_labels_may_be_missing_if_unused(tmp_path):
    """Samples may come without labels only where none are needed."""
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 2)))
    assert len(read_npz(tmp_path / "d.npz", labelled=False).y) == 0
    with pytest.raises(DataError, match=r"d\.npz has no array 'y'$") as caught:
        read_npz(tmp_path / "d.npz")
    assert caught.value.hint == "save it with numpy.savez(path, x=..., y=...)"
    np.savez(tmp_path / "d.npz", y=np.zeros(3))
    with pytest.raises(DataError, match=r"no array 'x'$"):
        read_npz(tmp_path / "d.npz", labelled=False)


@pytest.mark.parametrize("arrays", [{"x": np.zeros(()), "y": np.zeros(2)}, {"x": np.zeros(2), "y": np.zeros(())}])
def test_arrays_need_a_dimension_of_samples(tmp_path, arrays):
    """Arrays without a dimension of samples are refused."""
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=r"d\.npz: x and y must have a first dimension of samples$"):
        read_npz(tmp_path / "d.npz")


def test_pickled_object_is_refused(tmp_path):
    """A pickled object is refused and never run."""
    ran = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    objects = np.empty(1, dtype=object)
    objects[0] = Attack()
    np.savez(tmp_path / "d.npz", allow_pickle=True, x=objects, y=np.zeros(1))
    with pytest.raises(DataError, match=r"d\.npz can't be read as an \.npz archive"):
        read_npz(tmp_path / "d.npz")
    assert not ran.exists()


def test_rows_are_named_as_the_reader_knows(tmp_path):
    """Rows and columns are named by what the reader knows."""
    raw = Raw(np.zeros((2, 2)), np.zeros(2), tmp_path, columns=("area",), rows=("a.png", "b.png"))
    assert (raw.row_name(1), raw.column_name(0), raw.column_name(1)) == ("b.png", "column 'area'", "value 1")


@pytest.mark.parametrize(("suffix", "labels_suffix"), [("", ".gz"), (".gz", "")])
def test_images_are_scaled_and_labelled(tmp_path, suffix, labels_suffix):
    """Images are scaled to one and their labels found packed or not."""
    x, y = write_idx(tmp_path, suffix=suffix, labels_suffix=labels_suffix)
    raw = read_idx(tmp_path / f"{IMAGES}{suffix}")
    assert raw.x.dtype == np.float32
    np.testing.assert_array_equal(raw.x, x.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(raw.y, y)


# ------------------------------------------------------------------------------------------------------------ idx


def test_swapped_image_files_are_refused(tmp_path):
    """A label file given as images and images without labels are refused with a hint."""
    write_idx(tmp_path)
    with pytest.raises(DataError, match=r"is not an image file$") as caught:
        read_idx(tmp_path / LABELS)
    assert "-images-idx3-ubyte" in caught.value.hint
    (tmp_path / LABELS).unlink()
    with pytest.raises(DataError, match=f"the labels of .*{IMAGES} are missing$") as caught:
        read_idx(tmp_path / IMAGES)
    assert caught.value.hint == f"put {LABELS} (or {LABELS}.gz) beside it"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LABELS, lambda _: idx(np.zeros((6, 1), np.uint8)), f"{LABELS} is not a label file$"),
        *(
            (IMAGES, lambda whole, head=head: head + whole[4:], f"{IMAGES} is not an IDX file of unsigned bytes$")
            for head in (b"\1\0\x08\x03", b"\0\1\x08\x03", b"\0\0\x09\x03", b"\0\0\x08\0", b"\0\0\x08\5")
        ),
        *((IMAGES, lambda whole, keep=keep: whole[:keep], IMAGES) for keep in (2, 9, 20, -1)),
        (IMAGES, lambda whole: whole + b"\0", "does not hold"),
        *(
            (IMAGES, lambda _, sizes=sizes: b"\0\0\x08\x03" + sizes, "promises")
            for sizes in (b"\xff" * 12, b"\0\0\xff\xff" * 3)
        ),
        # A packed file is not unpacked beyond its header.
        (
            f"{IMAGES}.gz",
            lambda _: gzip.compress(idx(np.zeros((6, 2, 2), np.uint8)) + bytes(10_000_000)),
            "does not hold the 24 bytes that its header promises$",
        ),
        (f"{IMAGES}.gz", lambda whole: whole[:-9], "can't be read"),
    ],
)
def test_damaged_idx_is_refused(tmp_path, name, change, message):
    """Other magic, type, rank or size than the header's or a label file's."""
    suffix = ".gz" if name.endswith(".gz") else ""
    write_idx(tmp_path, suffix=suffix)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / f"{IMAGES}{suffix}")


def test_header_may_not_promise_too_much(tmp_path, monkeypatch):
    """One byte too many is refused before it is read."""
    write_idx(tmp_path)
    monkeypatch.setattr(data_files, "MAX_IDX_BYTES", 24)
    read_idx(tmp_path / IMAGES)
    monkeypatch.setattr(data_files, "MAX_IDX_BYTES", 23)
    with pytest.raises(DataError, match=f"{IMAGES} promises 24 bytes, more than 23$"):
        read_idx(tmp_path / IMAGES)


def npy(shape, data=b""):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue() + data


@pytest.mark.parametrize(
    "member",
    [npy((1 << 40, 4)), npy((1 << 62, 4)), b"garbage", b"", b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 15 + b"\n"],
    ids=["too big", "overflow", "no array", "empty", "header no literal"],
)
def test_hostile_npz_is_a_data_error(tmp_path, member):
    """Hostile npz members raise only data errors."""
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", member)
    with pytest.raises(DataError, match=r"d\.npz"):
        read_npz(path)


@pytest.mark.parametrize(("local", "central", "value"), [(8, 10, 99), (6, 8, 1)], ids=["compression", "encrypted"])
def test_unreadable_zip_is_a_data_error(tmp_path, local, central, value):
    """Unreadable zip members and a bare npy are data errors."""
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy((1,), b"0000"))
        archive.writestr("y.npy", npy((1,), b"0000"))
    raw = bytearray(path.read_bytes())
    raw[local] = raw[raw.find(b"PK\x01\x02") + central] = value
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"can't be read as an \.npz"):
        read_npz(path)
    path.write_bytes(npy((1,), b"0000"))
    with pytest.raises(DataError, match=r"can't be read as an \.npz"):
        read_npz(path)
