"""Runs with round keys on the loopback fleet when a disk fails, messages are damaged or repeated, or a device comes early."""

import pytest
from shoal_lab.loopback.transport import Hop

from edge_client.models.store import StateStore
from edge_client.run.held_models import HeldModels
from shoal.errors import ConfigError, IntegrityError, StorageError
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    names,
    reasons,
    restart_device,
    thetas,
    uploads_of,
)

OPTIONS = {"mode": "rotation", "quorum": 0.5, "deadline_s": 1000.0}
ILL = "dev-02"


def failing(monkeypatch, owner, method, error, times=1):
    """Let a method raise ``error`` the first times that it is called on behalf of dev-02; return the list of its calls."""
    real, calls = getattr(owner, method), []

    def call(self, *args, **options):
        place = self._folder if owner is StateStore else self._membership.directory
        if ILL in str(place) and len(calls) < times:
            calls.append(args)
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(owner, method, call)
    return calls


@pytest.fixture
def fleet(tmp_path, tap):
    """Yield a fleet of four after two rounds; no round may wait for its deadline."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=6, faults=tap, **OPTIONS) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 60)
        yield fleet


def finish(fleet):
    """Return the records of the whole run."""
    records = fleet.run(500)
    assert len(set(thetas(fleet).values())) == 1
    return records


def declined(records):
    return {(r["round"], name): reason for r in records for name, reason in r["declined"].items()}


def test_no_update_before_states_are_stored(fleet, tap, monkeypatch):
    """The job has been submitted by then. The round is declined, and after a restart the device is in step again."""
    failing(monkeypatch, StateStore, "commit", StorageError("can't write index.bin: No space left on device"))
    with pytest.raises(StorageError, match="No space left"):
        fleet.run_until(lambda: False, 60)
    fleet.kill_device(ILL)
    fleet.run_until(lambda: declined(fleet.records()), 60)
    (((at, name), reason),) = declined(fleet.records()).items()
    assert (name, reason) == (ILL, "disk")
    assert len(uploads_of(fleet, tap, ILL)) == at - 1
    fleet.revive_device(ILL)
    assert ILL in finish(fleet)[-1]["clusters"]


@pytest.mark.parametrize(
    ("owner", "method", "error", "told"),
    [
        (StateStore, "commit", ConfigError("can't write index.bin: Permission denied"), "other"),
        (HeldModels, "_unmask", IntegrityError("damaged"), "refused"),
    ],
    ids=["not stored", "a damaged mean"],
)
def test_round_without_its_state_is_skipped(fleet, monkeypatch, owner, method, error, told):
    """An error that is not the disk's does not end the device, and no update of that round leaves; the next mean brings both."""
    failing(monkeypatch, owner, method, error)
    records = finish(fleet)
    (((at, name), reason),) = declined(records).items()
    assert (name, reason) == (ILL, told)
    assert [r["round"] for r in records if ILL in r["norms"]] == [r for r in range(1, 8) if r != at]


def test_message_thrice_changes_nothing(fleet, tap, caplog):
    """Announcements, means and packages; the later copies come after the device's work."""
    tap.rules.append(lambda passage: (0.0, 0.4, 1.1) if passage.hop is Hop.DOWN else None)
    records = finish(fleet)
    assert [r["contributed"] for r in records] == [4] * 7
    assert not [text for text in reasons(caplog) if "erased" in text]


def test_restarted_device_knows_its_package(fleet, caplog):
    """A restarted device recognises the package of its run."""
    for name in names(4):
        restart_device(fleet, name)
    finish(fleet)
    assert not [text for text in reasons(caplog) if "run 1" in text]


def test_lost_states_come_from_a_checkpoint(fleet):
    """A device that lost its states asks for a checkpoint and goes on."""
    fleet.kill_device(ILL)
    for path in (fleet.stage.device_dir(ILL) / "models").glob("state-*.bin"):
        path.unlink()
    fleet.revive_device(ILL)
    records = finish(fleet)
    assert set(declined(records).values()) <= {"state"}
    assert ILL in records[-2]["norms"]


def test_early_admission_awaits_checkpoint(tmp_path):
    """A device that is admitted before the first round declines until there is a checkpoint."""
    data = grouped_data(5)
    first = {name: data[name] for name in names(4)}
    with make_fleet(tmp_path / "fleet", first, rounds=12, **OPTIONS) as fleet:
        fleet.stage.add_device("dev-04")
        fleet.publish()
        fleet.revive_device("dev-04", data["dev-04"])
        records = fleet.run(900)
        assert set(declined(records)) <= {(r, "dev-04") for r in (1, 2, 3)}
        assert "dev-04" in records[-2]["norms"]
        assert len(set(thetas(fleet).values())) == 1
