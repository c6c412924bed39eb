"""The file of a personal choice: what it holds, damage to it, and where it is stored."""

import dataclasses

import numpy as np
import pytest

from edge_client.checked_files import write_checked
from edge_client.storage import finished_models
from edge_client.storage.finished_models import (
    FINISHED_MODELS_KEPT,
    CandidateFit,
    FinishedModels,
    PersonalChoice,
    Validation,
)
from edge_client.storage.state import OwnModel
from shoal.errors import ConfigError, IntegrityError, StorageError
from shoal.limits import LOW_DISK_BYTES
from shoal.protocol.codec import encode
from shoal.util.files import private_directory
from tests.helpers.power_cuts import cut_at
from tests.helpers.tasks import logistic_bundle

TASK = logistic_bundle()
THETA = np.arange(TASK.length, dtype=np.float32)
CHOICE = PersonalChoice(
    version=1,
    run_id=bytes([1]) * 16,
    choice="alone",
    by_hand=False,
    fits=(CandidateFit("cluster", None), CandidateFit("alone", 0.25)),
    samples=9,
    folds=5,
    took_s=1.23456,
    made_at_s=1_800_000_000,
    length=len(THETA),
)


@pytest.fixture
def store(tmp_path):
    made = FinishedModels(private_directory(tmp_path / "device"))
    add(made, 1)
    return made


def add(store, run, start=b"start"):
    own = OwnModel(run, bytes([run]) * 16, 9, 0, np.full(TASK.length, float(run), np.float32))
    figures = {own.run_id: Validation(1.0, 1, 2, 2)}
    store.add(own, (), TASK, algorithm="fedavg", at_s=run, figures=figures, start=start)


def of_run(store, run):
    return next(m for m in store.models() if m.run == run)


def test_a_choice_comes_back_with_its_model(store, tmp_path):
    assert store.personal(of_run(store, 1)) is None
    store.save_personal(CHOICE, THETA)
    found, body = store.personal(of_run(store, 1))
    assert found == CHOICE
    np.testing.assert_array_equal(np.frombuffer(body, "<f4"), THETA)
    assert found.document() == {
        "choice": "alone",
        "by_hand": False,
        "losses": {"cluster": None, "alone": 0.25},
        "samples": 9,
        "folds": 5,
        "took_s": 1.235,
        "made_at": "2027-01-15T08:00:00Z",
    }


def test_going_back_keeps_the_figures(store):
    """Going back to the cluster drops the model and leaves the figures."""
    store.save_personal(CHOICE, THETA)
    store.save_personal(CHOICE.of_cluster(), None)
    found, body = store.personal(of_run(store, 1))
    assert (found.choice, found.by_hand, found.length, len(body)) == ("cluster", True, 0, 0)
    assert found.fits == CHOICE.fits


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]), "is damaged"),
        (lambda file: write_checked(file, encode(dataclasses.replace(CHOICE, version=2))), "has version 2, not 1"),
        (lambda file: write_checked(file, encode(CHOICE), b"1234"), "holds 4 bytes where 15 coordinates belong"),
    ],
)
def test_a_damaged_choice_is_refused(store, damage, reason):
    store.save_personal(CHOICE, THETA)
    damage(store._path(finished_models.PERSONAL_FILES, CHOICE.run_id))
    with pytest.raises(IntegrityError, match=reason) as caught:
        store.personal(of_run(store, 1))
    assert "shoal-edge personalise" in caught.value.hint


def test_power_cut_leaves_one_choice(tmp_path):
    """At every change of the disk."""
    old = dataclasses.replace(CHOICE, choice="3")
    outcomes, done = [], False
    while not done:
        made = FinishedModels(private_directory(tmp_path / f"d{len(outcomes)}"))
        add(made, 1)
        made.save_personal(old, THETA)
        done = cut_at(len(outcomes), made.save_personal, CHOICE, THETA)
        found, body = made.personal(of_run(made, 1))
        assert len(body) == 4 * len(THETA)
        outcomes.append(found.choice)
    assert set(outcomes) == {"3", "alone"}


def test_small_disk_is_left_as_it_is(store, monkeypatch):
    """A disk with too little space is left as it is."""
    store.save_personal(CHOICE.of_cluster(), None)
    monkeypatch.setattr("edge_client.storage.finished_models.free_bytes", lambda _: LOW_DISK_BYTES + 50)
    with pytest.raises(StorageError, match="too few for a personal model"):
        store.save_personal(CHOICE, THETA)
    assert store.personal(of_run(store, 1))[0].choice == "cluster"


def test_choices_go_with_their_runs(store):
    store.save_personal(CHOICE, THETA)
    for run in range(2, FINISHED_MODELS_KEPT + 2):
        add(store, run)
    names = [p.name for p in (store._folder).iterdir()]
    assert not any(name.startswith("personal-") for name in names)
    assert sum(name.startswith("start-") for name in names) == FINISHED_MODELS_KEPT


def test_the_start_of_a_run_comes_back(store):
    assert store.start_of(of_run(store, 1)) == b"start"
    path = store._path(finished_models.START_FILES, bytes([1]) * 16)
    path.write_bytes(b"x" * 50)
    with pytest.raises(IntegrityError, match="is damaged"):
        store.start_of(of_run(store, 1))
    add(store, 2, start=b"")
    with pytest.raises(ConfigError, match="nothing to train from after run 2"):
        store.start_of(of_run(store, 2))
