"""Environments of the peers: found, made, and named if they are not there."""

import subprocess

import pytest
from shoal_lab.bench.race import environments
from shoal_lab.bench.race.environments import MissingPeerError, find, folder, install, requirements

pytestmark = pytest.mark.torch
PEER = "pfl-research"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def commands(monkeypatch):
    """The commands that an installation would run."""
    ran = []
    monkeypatch.setattr(
        environments, "_run", lambda command: (ran.append(command), folder(PEER).mkdir(parents=True, exist_ok=True))
    )
    return ran


def test_a_peer_has_the_torch_that_shoal_has():
    import torch

    peer, ours = requirements(PEER)
    assert peer.startswith("pfl==")
    assert ours == "torch==" + torch.__version__.partition("+")[0]


def test_a_peer_that_is_not_installed_is_named_with_a_hint():
    with pytest.raises(MissingPeerError, match=r"pfl==.* is not installed in") as caught:
        find(PEER)
    assert caught.value.hint == "give --install"


def test_an_environment_is_made_once_and_anew_for_other_versions(commands, monkeypatch):
    told = []
    python = install(PEER, told.append)
    assert python == folder(PEER) / "bin" / "python"
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][-2:] == list(requirements(PEER))
    assert len(told) == 1
    assert install(PEER, told.append) == find(PEER) == python
    assert (len(commands), len(told)) == (2, 1)
    monkeypatch.setattr(environments, "PEERS", {PEER: "pfl==99"})
    with pytest.raises(MissingPeerError, match="pfl==99"):
        find(PEER)
    install(PEER, told.append)
    assert len(commands) == 4


def test_a_failed_installation_gives_pips_reason_and_leaves_no_folder(monkeypatch):
    def fail(command):
        folder(PEER).mkdir(parents=True, exist_ok=True)
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: slow\nERROR: No matching distribution found\n")

    monkeypatch.setattr(environments, "_run", fail)
    with pytest.raises(MissingPeerError, match="can't be installed: ERROR: No matching distribution found"):
        install(PEER, print)
    assert not folder(PEER).exists()


def test_an_installation_that_takes_too_long_is_named(monkeypatch):
    def late(command):
        raise subprocess.TimeoutExpired(command, 1800)

    monkeypatch.setattr(environments, "_run", late)
    with pytest.raises(MissingPeerError, match="timed out after 1800 seconds"):
        install(PEER, print)
