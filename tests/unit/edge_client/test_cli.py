"""The texts and figures of `shoal-edge`, without a process."""

import dataclasses
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from edge_client import cli, membership
from edge_client.answers import inference
from edge_client.answers.inference import Chosen
from edge_client.learning.executor import trial
from edge_client.storage.state import DeviceState, OwnModel
from shoal import limits
from shoal.errors import ConfigError, StorageError
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration
from shoal.util.files import exclusive
from tests.helpers.parties import Parties

CONNECTED = {"connected": True, "broker": "mqtt://reef:1883", "since": "2026-11-18T11:06:40Z"}
FULL = StorageError("can't write x: No space left on device", hint="free some space")


@pytest.fixture
def directory(tmp_path):
    return Parties(tmp_path, "dev-1").members["dev-1"].directory


@pytest.fixture
def said(capsys):
    """Return a function that returns (stdout, stderr) as lists of lines since the last time."""

    def read():
        out, err = capsys.readouterr()
        return out.splitlines(), err.splitlines()

    return read


def data(said):
    """Return the data of the one JSON object that was printed."""
    ((line,), _) = said()
    document = json.loads(line)
    assert document["ok"]
    return document["data"]


def status(directory, said, *, running=False):
    """Return what `status` says of a device whose program runs or does not."""
    with exclusive(directory, wait_s=0, hint="") if running else nullcontext():
        cli.status(directory, json=True)
    return data(said)


# ----------------------------------------------------------------------------------------------------------- status


def test_new_device_has_identity_and_disk(directory, said):
    """A device that has not run yet has its identity and disk."""
    found = status(directory, said)
    liveness = {"running": False, "connected": False, "broker": "mqtt://loopback:1883", "since": None}
    assert list(found) == ["device", "fleet", "fingerprint", "roster", "disk_free_bytes", *liveness]
    assert liveness.items() <= found.items()
    assert (found["device"], found["fleet"]) == ("dev-1", "reef")


def test_running_figures_are_added(directory, said):
    """The figures of the running program are added."""
    DeviceState(directory).save_status({"stage": "working", "rounds": 3, "connection": CONNECTED})
    with exclusive(directory, wait_s=0, hint=""):
        cli.status(directory)
    lines, _ = said()
    assert {"stage: working", "rounds taken part in: 3", "device: dev-1"} <= set(lines)
    assert "running, connected to mqtt://reef:1883 since 2026-11-18T11:06:40Z" in lines
    assert not [line for line in lines if line.startswith(("connect", "broker", "since"))]


def test_killed_device_is_not_running(directory, said):
    """It stayed ``working`` for ever."""
    DeviceState(directory).save_status({"stage": "working", "connection": CONNECTED})
    os.utime(directory / "status.json", (1795000000, 1795000000))
    found = status(directory, said)
    names = ("running", "connected", "stage", "last_stage", "since")
    assert [found[name] for name in names] == [False, False, "stopped", "working", "2026-11-18T11:06:40Z"]
    assert "connection" not in found
    cli.status(directory)
    assert "not running since 2026-11-18T11:06:40Z" in said()[0]


def test_device_whose_broker_is_away_says_so(directory, said):
    lost = {**CONNECTED, "connected": False, "reason": "Connection refused"}
    DeviceState(directory).save_status({"stage": "sending", "connection": lost})
    found = status(directory, said, running=True)
    assert (found["running"], found["connected"], found["stage"]) == (True, False, "sending")
    assert (found["broker"], found["disconnected_because"]) == ("mqtt://reef:1883", "Connection refused")
    with exclusive(directory, wait_s=0, hint=""):
        cli.status(directory)
    assert "running, not connected to mqtt://reef:1883 since 2026-11-18T11:06:40Z" in said()[0]


@pytest.mark.parametrize("connection", [None, "x", [1], {}])
def test_a_damaged_connection_counts_as_none(directory, said, connection):
    DeviceState(directory).save_status({"stage": "idle", "connection": connection})
    found = status(directory, said, running=True)
    assert (found["connected"], found["stage"]) == (False, "idle")


def test_stopped_by_its_disk_says_why(directory, said):
    """A device that its disk stopped says why and when."""
    files = DeviceState(directory)
    files.save_status({"stage": "working"})
    files.clear_trouble()
    files.save_trouble(FULL, "2026-01-02")
    found = status(directory, said)
    told = [found[name] for name in ("stage", "error", "hint", "stopped_at")]
    assert told == ["stopped", str(FULL), FULL.hint, "2026-01-02"]


def test_full_disk_is_an_error_unrecorded(directory, said, monkeypatch):
    """A disk that is full now is an error though the device could not record it."""
    monkeypatch.setattr("edge_client.status.free_bytes", lambda _: limits.LOW_DISK_BYTES - 1)
    full = f"the disk is full: {limits.LOW_DISK_BYTES - 1} bytes are free in {directory}"
    assert status(directory, said)["error"] == full
    monkeypatch.setattr("edge_client.status.free_bytes", lambda _: limits.LOW_DISK_BYTES)
    assert "error" not in status(directory, said)


def test_revoked_device_stays_revoked(tmp_path, said):
    """A revoked device is revoked whatever its last stage was."""
    parties = Parties(tmp_path, "dev-1")
    member = parties.members["dev-1"]
    DeviceState(member.directory).save_status({"stage": "working"})
    parties.owner.revoke("dev-1")
    member.adopt(parties.owner.roster_bytes)
    assert status(member.directory, said)["stage"] == "revoked"


# ----------------------------------------------------------------------------------------------------------- models


def test_several_outputs_share_a_line(monkeypatch, tmp_path, inputs, said):
    """Outputs of several numbers share a line."""
    bundle = SimpleNamespace(manifest=SimpleNamespace(data=NO_DECLARATION))
    made = SimpleNamespace(live=False, own=None, bundle=bundle, document=lambda *_, **__: {})
    monkeypatch.setattr(inference, "choose", lambda *_, **__: made)
    for outputs, lines in (
        (np.array([0, 2]), ["0", "2"]),
        (np.array([[0.25, 1.0], [1e-9, 3.0]], np.float32), ["0.25 1", "1e-09 3"]),
    ):
        made.predict = lambda *_, outputs=outputs, **__: outputs
        cli.predict(tmp_path, inputs)
        assert said() == (lines, [])


# ---------------------------------------------------------------------------------------------- predict and export


@pytest.fixture
def chosen(monkeypatch, logistic):
    """Let a model of zeros answer."""
    own = OwnModel(1, bytes(16), 9, 4, np.zeros(15, np.float32))
    made = Chosen(logistic(4, 3), (own,), live=False)
    monkeypatch.setattr(inference, "choose", lambda *_, **__: made)


@pytest.fixture
def inputs(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 4)))
    return tmp_path / "d.npz"


def test_export_names_file_and_model_in_it(chosen, tmp_path, said):
    """An export of a node that is not held writes nothing."""
    file = tmp_path / "m.onnx"
    with pytest.raises(ConfigError, match="node 7"):
        cli.export(tmp_path, file, node=7)
    assert not file.exists()
    cli.export(tmp_path, file)
    assert said()[0] == [f"{file}: cluster 4 of run 1"]
    assert file.stat().st_size > 0


# --------------------------------------------------------------------------------------------------- other commands


def test_init_prints_card_and_fingerprint(tmp_path, said):
    """Init prints the card for programs and the fingerprint for people."""
    cli.init(tmp_path / "new", "dev-9")
    out, err = said()
    assert out == [str(tmp_path / "new" / "dev-9.card")]
    assert err[0].startswith("fingerprint ")
    assert "shoal-fleet add-device" in err[1]


def test_join_warns_of_onnx_runtime(tmp_path, said, monkeypatch):
    """The device has joined all the same: it can take part with numpy."""
    parties = Parties(tmp_path)
    card = membership.init(tmp_path / "dev-9", "dev-9")
    grant = parties.owner.add_device(card.read_bytes())
    monkeypatch.setattr(trial, "failure", lambda: "ONNX Runtime ended its process with SIGILL")
    cli.join(tmp_path / "dev-9", grant, parties.owner.fingerprint)
    out, err = said()
    assert out == ["joined fleet reef as dev-9"]
    assert err[:2] == ["warning: ONNX Runtime ended its process with SIGILL", f"hint: {trial.HINT}"]
    assert err[2:] == [f"next: shoal-edge run {tmp_path / 'dev-9'} --data FILE"]


@pytest.fixture
def named(monkeypatch, logistic):
    """Let a model answer that takes sample i of X for class i, of a task with names of labels."""
    bundle = logistic(4, 3)
    task = dataclasses.replace(bundle.manifest, data=DataDeclaration(labels=("cat", "dog", "fox")))
    weights = np.zeros(15, np.float32)
    weights[[0, 4, 8]] = 1.0
    own = OwnModel(1, bytes(16), 9, 4, weights)
    made = Chosen(dataclasses.replace(bundle, manifest=task), (own,), live=False)
    monkeypatch.setattr(inference, "choose", lambda *_, **__: made)
    return made


def table(tmp_path, *labels):
    lines = [",".join([*("1" if i == j else "0" for j in range(4)), label]) for i, label in enumerate(labels)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    return tmp_path / "d.csv"


def test_answers_have_names_of_the_labels(named, tmp_path, said):
    source = table(tmp_path, "cat", "dog", "fox")
    cli.predict(tmp_path, source)
    assert said()[0] == ["cat", "dog", "fox"]
    cli.predict(tmp_path, source, json=True)
    found = data(said)
    assert (found["predictions"], found["labels"]) == ([0, 1, 2], ["cat", "dog", "fox"])
    cli.predict(tmp_path, source, probabilities=True)
    assert said()[0][0] == "0.576117 0.211942 0.211942"
    cli.predict(tmp_path, source, probabilities=True, json=True)
    assert [round(sum(row), 6) for row in data(said)["probabilities"]] == [1, 1, 1]


def test_evaluation_has_the_majority_too(named, tmp_path, said):
    """An evaluation has the figures beside the majoritys."""
    source = table(tmp_path, "cat", "dog", "dog")
    cli.evaluate(tmp_path, source)
    lines, notes = said()
    assert lines == [
        "accuracy 66.7% on 3 samples; the most common label, dog, alone 66.7%",
        "true \\ predicted cat dog fox",
        "cat                1   0   0",
        "dog                0   1   1",
        "fox                0   0   0",
    ]
    assert notes == ["warning: the model is no better than a guess that looks at no sample"]
