"""`shoal data` as a person calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.datafiles import digits
from tests.helpers.trees import ONE_THREAD, ROOT


@pytest.fixture
def shoal(tmp_path, monkeypatch):
    """Call `shoal` on a machine whose cache is empty."""
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)

    def call(*arguments, status=0):
        done = subprocess.run(
            [sys.executable, "-c", "from shoal.cli import main; main()", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


def test_list_says_where_each_set_is(shoal, tmp_path):
    """The list says where each is or how to get it."""
    lines = shoal("data", "list").stdout.splitlines()
    assert lines[0] == "mnist          not here: shoal data fetch mnist"
    digits(tmp_path / "cache/shoal/mnist")
    made = json.loads(shoal("data", "list", "--json").stdout)["data"]["datasets"]
    found = {d["name"]: d for d in made}
    assert set(found) == {"mnist", "fashion-mnist", "cifar10", "femnist", "sent140", "ag-news", "cmapss", "air"}
    assert found["mnist"]["folder"] == str(tmp_path / "cache/shoal/mnist")
    assert found["cifar10"]["folder"] is None
    assert str(tmp_path / "cache/shoal/cifar10") in found["cifar10"]["places"]
    for name, line in zip(("cifar10", "femnist", "sent140", "ag-news"), lines[2:6], strict=True):
        assert line.endswith(f" in {tmp_path}/cache/shoal/{name}"), line
    for name, line in zip(("cmapss", "air"), lines[6:], strict=True):
        assert f" to {tmp_path}/cache/shoal/{name}/{name}.npz, " in line, line
    assert found["cifar10"]["obtain"].endswith(f" in {tmp_path}/cache/shoal/cifar10")


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("cifar10", "cifar10 can't be fetched", "cifar-10-binary.tar.gz"),
        ("cifar10", "cifar10 can't be fetched", " in {}/cache/shoal/cifar10\n"),
        ("imagenet", "no data set 'imagenet'", "there are ag-news, air, cifar10"),
    ],
)
def test_only_mnist_is_fetched(shoal, tmp_path, name, error, hint):
    done = shoal("data", "fetch", name, status=2)
    assert f"error: {error}" in done.stderr
    assert hint.format(tmp_path) in done.stderr
