"""The list of finished models: the rule, rollback, and every point at which a write can be cut off."""

import dataclasses
import stat

import numpy as np
import pytest

from edge_client.checked_files import write_checked
from edge_client.storage import finished_models
from edge_client.storage.finished_models import (
    FINISHED_MODELS_KEPT,
    UNMEASURED,
    CandidateFit,
    FinishedList,
    FinishedModels,
    PersonalChoice,
    Validation,
    best_of,
    measured,
)
from edge_client.storage.state import OwnModel
from shoal.errors import ConfigError, IntegrityError, ShoalError, StorageError
from shoal.limits import LOW_DISK_BYTES
from shoal.protocol.codec import encode
from shoal.protocol.documents import ModelChoice
from shoal.util.console import second
from shoal.util.files import private_directory, write_private
from tests.helpers.power_cuts import CutAt, cut_at
from tests.helpers.tasks import logistic_bundle

TASK = logistic_bundle()
OTHER_TASK = logistic_bundle(classes=4)
AT_S = 1_800_000_000


@pytest.fixture
def store(tmp_path):
    return FinishedModels(private_directory(tmp_path / "device"))


def own_model(run, cluster=0):
    return OwnModel(run, bytes([run]) * 16, 9, cluster, np.full(TASK.length, float(run), np.float32))


def fit(accuracy):
    return Validation(1.0, round(100 * accuracy), 100, 100)


def add(store, run, accuracy=0.5, *, task=TASK, above=(), figures=None, start=b""):
    figures = figures or {own_model(run).run_id: fit(accuracy)}
    store.add(own_model(run), above, task, algorithm="fedavg", at_s=AT_S + run, figures=figures, start=start)


def run_in_use(store):
    answers = store.standing().answers
    return None if answers is None else answers.run


def files(store):
    return sorted(p.name for p in store._folder.iterdir())


def test_nothing_finished_answers_nothing(store):
    assert store.models() == ()
    assert store.answering() is None
    assert run_in_use(store) is None
    store.tidy()
    with pytest.raises(ConfigError, match="no finished model yet"):
        store.rollback(None)


def test_model_comes_back_with_its_figures(store):
    """A finished model comes back with its task and figures."""
    above = own_model(1, cluster=4)
    add(store, 1, 0.9, above=[above])
    model, task, models = store.answering()
    assert task.digest == TASK.digest == model.task
    assert [m.cluster for m in models] == [4, 0]
    assert all(np.array_equal(m.theta, above.theta) for m in models)
    assert model.document() == {
        "run": 1,
        "run_id": "01" * 16,
        "round": 9,
        "algorithm": "fedavg",
        "cluster": 0,
        "task_digest": TASK.digest.hex(),
        "finished_at": "2027-01-15T08:00:01Z",
        "validation_loss": 1.0,
        "validation_accuracy": 0.9,
        "validation_samples": 100,
    }


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.5], 1),
        ([0.5, 0.6], 2),
        ([0.5, 0.5], 2),
        ([0.6, 0.5], 1),
        ([0.91, 0.95, 0.93], 2),
        ([0.95, 0.95, 0.93], 2),
        ([0.9, 0.2, 0.3], 1),
    ],
)
def test_newest_answers_unless_worse(store, accuracies, expected):
    """The newest answers unless an older one is better."""
    for run, accuracy in enumerate(accuracies, 1):
        add(store, run, accuracy)
    assert run_in_use(store) == expected


def test_other_tasks_are_not_compared(store):
    """Models of another task are not compared."""
    add(store, 1, 0.99)
    add(store, 2, 0.3, task=OTHER_TASK)
    assert run_in_use(store) == 2
    add(store, 3, 0.5)
    assert run_in_use(store) == 1


@pytest.mark.parametrize(
    ("losses", "expected"), [([0.5, 0.4], 2), ([0.4, 0.5], 1), ([0.5, float("nan")], 1), ([float("inf"), 3.0], 2)]
)
def test_regression_compares_losses(store, losses, expected):
    """Regression compares losses and an unusable loss is the worst."""
    figures = {}
    for run, loss in enumerate(losses, 1):
        figures[own_model(run).run_id] = measured(loss, 0, 12, 12, regression=True)
        add(store, run, figures=figures)
    assert store.models()[-1].validation.accuracy is None
    assert run_in_use(store) == expected


def test_unusable_loss_is_the_worst():
    """A classifier without a usable loss is worse than any other."""
    assert measured(float("nan"), 90, 100, 100, regression=False).rank < fit(0.0).rank
    assert UNMEASURED.rank < fit(0.0).rank
    assert best_of([]) is None


def test_figures_measured_again_replace(store):
    """Figures of earlier models are replaced by those measured again."""
    add(store, 1, 0.9)
    add(store, 2, figures={own_model(1).run_id: fit(0.2), own_model(2).run_id: fit(0.6)})
    assert [m.validation.accuracy for m in store.models()] == [0.2, 0.6]
    assert run_in_use(store) == 2


def test_only_the_newest_models_stay(store):
    """Only the newest models stay and a run is listed once."""
    for run in range(1, FINISHED_MODELS_KEPT + 3):
        add(store, run)
        add(store, run)
    assert [m.run for m in store.models()] == [3, 4, 5]
    assert len(files(store)) == FINISHED_MODELS_KEPT + 2
    assert {stat.S_IMODE(p.stat().st_mode) for p in store._folder.iterdir()} == {0o600}
    assert stat.S_IMODE(store._folder.stat().st_mode) == 0o700


# ---------------------------------------------------------------------------------------------------- rollback


def test_rollback_goes_back_one_by_one(store):
    """Rollback goes back one by one and ends when a later run finishes."""
    for run in (1, 2, 3):
        add(store, run, run / 10)
    assert store.rollback(None).run == 2
    assert store.rollback(None).run == 1
    assert [(d["run"], d["answers"], d["pinned"]) for d in store.standing().documents()] == [
        (3, False, False),
        (2, False, False),
        (1, True, True),
    ]
    with pytest.raises(ConfigError, match="no finished model older than run 1's: it has runs 3, 2, 1"):
        store.rollback(None)
    assert run_in_use(store) == 1
    assert store.rollback(3).run == 3
    assert store.standing().pinned
    store.rollback(2)
    add(store, 4, 0.35)
    assert run_in_use(store) == 4
    assert not store.standing().pinned


@pytest.mark.parametrize(
    "go_back", [lambda store: store.rollback(1), lambda store: store.choose(choice(1))], ids=["rollback", "choice"]
)
def test_a_damaged_model_is_not_chosen(store, go_back):
    add(store, 1, 0.5)
    add(store, 2, 0.6)
    damage(store, store.models()[0])
    with pytest.raises(IntegrityError, match="is damaged"):
        go_back(store)
    assert chosen(store) == (2, False)


def test_finishing_run_ends_a_rollback(store, monkeypatch):
    """A run that finishes during a rollback wins and the person hears of it."""
    add(store, 1, 0.5)
    add(store, 2, 0.6)
    real = FinishedModels._read

    def read(self, *arguments):
        monkeypatch.setattr(FinishedModels, "_read", real)
        add(store, 3, 0.7)
        return real(self, *arguments)

    monkeypatch.setattr(FinishedModels, "_read", read)
    with pytest.raises(ConfigError, match="a later run has just finished"):
        store.rollback(1)
    assert run_in_use(store) == 3


# ---------------------------------------------------------------------------------------------------- damage


def damage(store, model):
    path = store._folder / f"model-{model.own.file.hex()}.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    write_private(path, bytes(data))


def test_damaged_model_has_a_way_out(store):
    """A damaged model or one whose file is missing is refused with a way out."""
    add(store, 1)
    damage(store, store.models()[0])
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        store.answering()
    assert "rollback" in caught.value.hint
    assert "--live" in caught.value.hint
    for path in store._folder.glob("model-*"):
        path.unlink()
    with pytest.raises(ShoalError, match="can't read"):
        store.answering()


@pytest.mark.parametrize("name", ["list.bin", "rollback.bin"])
@pytest.mark.parametrize("change", [lambda d: d[:0], lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"X" + d[1:]])
def test_damaged_list_removes_no_file(store, name, change):
    """A damaged list or choice is refused and no file is removed."""
    add(store, 1)
    add(store, 2)
    store.rollback(1)
    path = store._folder / name
    write_private(path, change(path.read_bytes()))
    before = files(store)
    with pytest.raises(IntegrityError, match="damaged"):
        store.standing()
    store.tidy()
    assert files(store) == before
    add(store, 3)
    assert store.models()[-1].run == 3


def test_list_of_another_version_is_refused(store):
    add(store, 1)
    write_checked(store._folder / "list.bin", encode(FinishedList(2, ())))
    with pytest.raises(IntegrityError, match="has version 2, not 1") as caught:
        store.models()
    assert "remove" in caught.value.hint
    assert store.of_run(own_model(1).run_id) is None


def test_removed_model_is_looked_up_again(store, monkeypatch):
    """`shoal-edge predict` beside `shoal-edge run`: the list changes between the two reads."""
    add(store, 1, 0.9)
    stale = store.models()
    for run in (2, 3, 4):
        add(store, run, 0.5)
    real = FinishedModels.models

    def models(self):
        monkeypatch.setattr(FinishedModels, "models", real)
        return stale

    monkeypatch.setattr(FinishedModels, "models", models)
    assert store.answering()[0].run == 4


# ---------------------------------------------------------------------------------------------------- power cuts


def test_cut_at_any_change_of_the_disk(tmp_path):
    """Each with all of its files; the next start removes files that are left over, and the same run can be added again."""
    outcomes, cuts, ended = set(), 0, False
    while not ended:
        store = FinishedModels(private_directory(tmp_path / str(cuts)))
        for run in (1, 2, 3):
            add(store, run, run / 10, above=[own_model(run, cluster=4)])
        above = [own_model(4, cluster=4)]
        ended = cut_at(cuts, add, store, 4, 0.4, task=OTHER_TASK, above=above)
        runs = tuple(m.run for m in store.models())
        outcomes.add(runs)
        model, _, models = store.answering()
        assert (model.run, len(models)) == (runs[-1], 2)
        for listed in store.models():
            store.task(listed)
            store.load(listed, listed.own)
        store.tidy()
        assert len([n for n in files(store) if not n.startswith(".")]) == 1 + 6 + len({m.task for m in store.models()})
        add(store, 4, 0.4, task=OTHER_TASK)
        assert run_in_use(store) == 4
        cuts += 1
    assert outcomes == {(1, 2, 3), (2, 3, 4)}
    assert cuts > 16


def test_cut_in_first_change_or_rollback(tmp_path):
    """A cut during the first change or a rollback leaves all or nothing."""
    cuts, ended = 0, False
    while not ended:
        store = FinishedModels(private_directory(tmp_path / f"a{cuts}"))
        chosen = FinishedModels(private_directory(tmp_path / f"b{cuts}"))
        add(chosen, 1, 0.5)
        add(chosen, 2, 0.6)
        ended = cut_at(cuts, add, store, 1)
        ended = cut_at(cuts, FinishedModels.rollback, chosen, 1) and ended
        assert [m.run for m in store.models()] in ([], [1])
        assert (run_in_use(chosen), chosen.standing().pinned) in ((2, False), (1, True))
        cuts += 1
    assert store.models()
    assert chosen.standing().pinned


def test_files_are_written_before_the_list(store):
    """New files are on the disk before the list names them."""
    add(store, 1)
    with pytest.MonkeyPatch.context() as patch:
        log = CutAt(patch, 10**6).log
        add(store, 2)
    kinds = ["list" if name == "replace" and entry[1].endswith("list.bin") else name for name, *entry in log]
    listed = kinds.index("list")
    before = kinds[:listed]
    assert before.count("replace") == 2
    last_name = len(before) - 1 - before[::-1].index("replace")
    assert "fsync" in before[last_name:]
    assert before.count("fdatasync") == 3
    assert kinds[listed + 1] == "fsync"
    assert "unlink" not in before


def test_leftovers_go_at_the_next_start(store):
    add(store, 1)
    stray = [store._folder / f"model-{'ab' * 32}.bin", store._folder / f"task-{'cd' * 32}.bin"]
    for path in stray:
        write_private(path, b"left over")
    store.tidy()
    assert not any(p.exists() for p in stray)
    assert run_in_use(store) == 1


def test_times_beyond_calendar_are_numbers():
    assert second(0) == "1970-01-01T00:00:00Z"
    assert second(2**63) == f"second {2**63}"


def choice(run, sequence=7, latest=3):
    run_id = bytes([run]) * 16 if run else bytes(16)
    return ModelChoice(fleet="reef", sequence=sequence, run=run, run_id=run_id, latest=latest)


def chosen(store):
    """Return the run that answers, and whether the owner chose it."""
    standing = store.standing()
    return standing.answers.run, standing.by_owner


def test_owners_choice_holds_until_next_run(store):
    """The owners choice answers until a later run finishes or the owner gives it back."""
    for run in (1, 2, 3):
        add(store, run, run / 10)
    assert store.choose(choice(1)) == "run 1's model answers until a later run finishes"
    assert chosen(store) == (1, True)
    assert [d["chosen_by_owner"] for d in store.standing().documents()] == [False, False, True]
    assert store.choose(choice(0, sequence=8)) == "the device follows its own rule again"
    assert chosen(store) == (3, False)
    store.choose(choice(1, sequence=9))
    add(store, 4, 0.9)
    assert chosen(store) == (4, False)


def test_a_choice_is_taken_once(store):
    """The broker retains it: the device's own rollback stays in force, also over a restart."""
    for run in (1, 2, 3):
        add(store, run)
    store.choose(choice(1))
    store.rollback(2)
    assert FinishedModels(store._device).choose(choice(1)) is None
    assert chosen(store) == (2, False)
    assert store.choose(choice(3, sequence=6)) is None, "an older one"
    assert store.choose(choice(3, sequence=8)) is not None
    assert chosen(store) == (3, True)


@pytest.mark.parametrize(
    ("runs", "wanted", "effect"),
    [
        ((), choice(1), "no effect: this device has no finished model of run 1"),
        ((2, 3), choice(1), "no effect: this device has no finished model of run 1"),
        ((1, 4), choice(1), "no effect: run 4 has finished since"),
    ],
)
def test_unfit_choice_changes_nothing(store, runs, wanted, effect):
    """A choice that does not fit leaves the device as it is."""
    for run in runs:
        add(store, run)
    before = run_in_use(store)
    assert store.choose(wanted) == effect
    assert run_in_use(store) == before
    assert store.choose(wanted) is None


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
def ended(tmp_path):
    made = FinishedModels(private_directory(tmp_path / "device"))
    add(made, 1, start=b"start")
    return made


def of_run(ended, run):
    return next(m for m in ended.models() if m.run == run)


def test_a_choice_comes_back_with_its_model(ended, tmp_path):
    assert ended.personal(of_run(ended, 1)) is None
    ended.save_personal(CHOICE, THETA)
    found, body = ended.personal(of_run(ended, 1))
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


def test_going_back_keeps_the_figures(ended):
    """Going back to the cluster drops the model and leaves the figures."""
    ended.save_personal(CHOICE, THETA)
    ended.save_personal(CHOICE.of_cluster(), None)
    found, body = ended.personal(of_run(ended, 1))
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
def test_a_damaged_choice_is_refused(ended, damage, reason):
    ended.save_personal(CHOICE, THETA)
    damage(ended._path(finished_models.PERSONAL_FILES, CHOICE.run_id))
    with pytest.raises(IntegrityError, match=reason) as caught:
        ended.personal(of_run(ended, 1))
    assert "shoal-edge personalise" in caught.value.hint


def test_power_cut_leaves_one_choice(tmp_path):
    """At every change of the disk."""
    old = dataclasses.replace(CHOICE, choice="3")
    outcomes, done = [], False
    while not done:
        made = FinishedModels(private_directory(tmp_path / f"d{len(outcomes)}"))
        add(made, 1, start=b"start")
        made.save_personal(old, THETA)
        done = cut_at(len(outcomes), made.save_personal, CHOICE, THETA)
        found, body = made.personal(of_run(made, 1))
        assert len(body) == 4 * len(THETA)
        outcomes.append(found.choice)
    assert set(outcomes) == {"3", "alone"}


def test_small_disk_is_left_as_it_is(ended, monkeypatch):
    """A disk with too little space is left as it is."""
    ended.save_personal(CHOICE.of_cluster(), None)
    monkeypatch.setattr("edge_client.storage.finished_models.free_bytes", lambda _: LOW_DISK_BYTES + 50)
    with pytest.raises(StorageError, match="too few for a personal model"):
        ended.save_personal(CHOICE, THETA)
    assert ended.personal(of_run(ended, 1))[0].choice == "cluster"


def test_choices_go_with_their_runs(ended):
    ended.save_personal(CHOICE, THETA)
    for run in range(2, FINISHED_MODELS_KEPT + 2):
        add(ended, run, start=b"start")
    names = [p.name for p in (ended._folder).iterdir()]
    assert not any(name.startswith("personal-") for name in names)
    assert sum(name.startswith("start-") for name in names) == FINISHED_MODELS_KEPT


def test_the_start_of_a_run_comes_back(ended):
    assert ended.start_of(of_run(ended, 1)) == b"start"
    path = ended._path(finished_models.START_FILES, bytes([1]) * 16)
    path.write_bytes(b"x" * 50)
    with pytest.raises(IntegrityError, match="is damaged"):
        ended.start_of(of_run(ended, 1))
    add(ended, 2, start=b"")
    with pytest.raises(ConfigError, match="nothing to train from after run 2"):
        ended.start_of(of_run(ended, 2))
