"""Environments of the peers: found, made, and named if they are not there."""

import subprocess

import pytest
from shoal_lab.bench.race import benchmark as environments
from shoal_lab.bench.race.benchmark import MissingPeerError, folder, install_peer, python_of, requirements

pytestmark = pytest.mark.torch
PEER = "pfl-research"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_environment_is_made_once_and_anew(monkeypatch):
    """With the torch that Shoal has; anew for other versions."""
    import torch

    ran, told = [], []
    monkeypatch.setattr(
        environments, "_run", lambda command: (ran.append(command), folder(PEER).mkdir(parents=True, exist_ok=True))
    )
    with pytest.raises(MissingPeerError, match=r"pfl==.* is not installed in") as caught:
        python_of(PEER)
    assert caught.value.hint == "give --install"
    assert (
        install_peer(PEER, told.append)
        == install_peer(PEER, told.append)
        == python_of(PEER)
        == folder(PEER) / "bin" / "python"
    )
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-m", "pip"]]
    assert ran[1][-3:] == list(requirements(PEER))
    assert ran[1][-1] == "torch==" + torch.__version__.partition("+")[0]
    assert len(told) == 1
    monkeypatch.setattr(environments, "PEERS", {PEER: "pfl==99"})
    with pytest.raises(MissingPeerError, match="pfl==99"):
        python_of(PEER)
    install_peer(PEER, told.append)
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            subprocess.CalledProcessError(1, "pip", stderr="WARNING: slow\nERROR: No matching distribution\n"),
            "No match",
        ),
        (subprocess.TimeoutExpired("pip", 1800), "timed out after 1800 seconds"),
    ],
)
def test_failed_installation_gives_a_reason(monkeypatch, error, reason):
    """And leaves no folder."""

    def fail(_command):
        folder(PEER).mkdir(parents=True, exist_ok=True)
        raise error

    monkeypatch.setattr(environments, "_run", fail)
    with pytest.raises(MissingPeerError, match=f"can't be installed: .*{reason}") as caught:
        install_peer(PEER, print)
    assert "check the network" in caught.value.hint
    assert not folder(PEER).exists()
