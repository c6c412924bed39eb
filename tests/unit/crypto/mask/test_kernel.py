"""The compiled kernel gives numpy's bits, or is left unused with a warning."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from crypto.mask import hadamard, kernel, stream
from crypto.mask.kernel import CHECKED, EXPECTED, Kernel, fixed_digits, fixed_vector, installed
from crypto.mask.masking import mask, unmask
from shoal.digests import sha256
from shoal.types import MaskedVector
from tests.helpers.masks import key_of

SOURCE = Path(__file__).parents[4] / "deploy" / "kernel" / "shoal_kernel" / "kernel.c"
COMPILER = shutil.which("cc")
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-fast-math", "-fno-associative-math")
LENGTHS = (1, 2, 3, 5, 64, 100, 127, 640, 4095, 4096, 4097, 9000, 65_537, 159_010)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")


def build(folder, *flags, source=None):
    """Compile the kernel, and return its library."""
    library = folder / "_kernel.so"
    subprocess.run([COMPILER, *FLAGS, *flags, "-o", library, source or SOURCE], check=True, capture_output=True)
    return library


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Kernel(build(tmp_path_factory.mktemp("kernel")))


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes a kernel the installed one; None for numpy alone."""

    def use_it(found):
        for module in (hadamard, stream):
            monkeypatch.setattr(module, "installed", lambda: found)

    return use_it


@pytest.fixture
def looked_for(monkeypatch):
    """Return a function that looks for the distribution, whose library is given; None if it is not installed."""

    def look(library):
        monkeypatch.setitem(sys.modules, kernel.PACKAGE, None if library is None else SimpleNamespace(LIBRARY=library))
        installed.cache_clear()
        return installed()

    yield look
    installed.cache_clear()


def test_expected_digest_is_numpys():
    """The digest that the kernel must reach is that of the numpy code."""
    made = b""
    for count, bits in CHECKED:
        vector = fixed_vector(count)
        hadamard._passes(vector, bits, np.float32(0.5))
        made += vector.tobytes() + stream._by_radix(*fixed_digits(count)).tobytes()
    assert sha256(made) == EXPECTED


@needs_compiler
@pytest.mark.parametrize("length", LENGTHS)
def test_kernel_gives_numpys_bits(built, use, length):
    rng = np.random.default_rng(length)
    vector = (rng.standard_normal(length) * 10.0 ** rng.integers(-30, 30, length)).astype(np.float32)
    found = []
    for each in (None, built):
        use(each)
        there, back = vector.copy(), vector.copy()
        hadamard.transform(there)
        hadamard.untransform(back)
        found.append((there.tobytes(), back.tobytes(), stream.permutation(bytes(32), length).tobytes()))
    assert found[0] == found[1]


@needs_compiler
def test_sort_in_groups_is_the_same(built, use, monkeypatch):
    monkeypatch.setattr(stream, "_GROUP", 1000)
    found = []
    for each in (None, built):
        use(each)
        found.append(stream.permutation(bytes(32), 5000).tobytes())
    assert found[0] == found[1]


@needs_compiler
@pytest.mark.parametrize("mode", ["rotation", "permutation"])
def test_masks_are_the_same(built, use, mode):
    """A device with the kernel opens what one without it has masked."""
    vector = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    use(None)
    plain = mask(vector, key_of(mode, 5000))
    use(built)
    key = key_of(mode, 5000)
    assert mask(vector, key).values.tobytes() == plain.values.tobytes()
    opened = unmask(MaskedVector(plain.values, key.key_id), key)
    use(None)
    assert unmask(MaskedVector(plain.values, key.key_id), key_of(mode, 5000)).tobytes() == opened.tobytes()


@needs_compiler
def test_installed_kernel_is_used(tmp_path, looked_for, caplog):
    assert looked_for(None) is None
    assert isinstance(looked_for(build(tmp_path)), Kernel)
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ("a[i] + b[i]", "b[i] + a[i] * 1.0000001f"),
        ("butterflies(tile, bits, here);", "butterflies(tile, bits - 1, here);"),
        ("(int32_t)second[i]", "(int32_t)first[i]"),
        ("shoal_sorted", "another_name"),
    ],
)
def test_wrong_kernel_is_left_unused(tmp_path, looked_for, caplog, change, instead):
    """One that rounds otherwise, leaves a step out, or lacks a function: the masks stay numpy's, with a warning."""
    source = tmp_path / "kernel.c"
    assert change in SOURCE.read_text()
    source.write_text(SOURCE.read_text().replace(change, instead))
    with caplog.at_level(logging.WARNING):
        assert looked_for(build(tmp_path, source=source)) is None
    assert "not used" in caplog.text


def test_no_library_is_no_kernel(tmp_path, looked_for, caplog):
    (tmp_path / "_kernel.so").write_bytes(b"for another processor")
    assert looked_for(tmp_path / "_kernel.so") is None
    assert "not used" in caplog.text


@needs_compiler
def test_sort_without_memory_says_so(built, monkeypatch):
    monkeypatch.setattr(built, "_sorted", lambda *_: 1)
    with pytest.raises(MemoryError):
        built.sorted(*fixed_digits(5))
