"""The matrix of lies: a rostered device signs each of its fields falsely, and costs itself alone.

docs/threat-model.md has a table of all fields that a device signs, each of one class. The class is what the owner learns:

- checkable: whoever signs a false value is named;
- limited: values beyond a limit are refused and their device named, those within have a bounded effect;
- suspect: nobody can check the value, and its effect is bounded.

A message that can't be decoded names its signer, whatever the field's class.
"""

import dataclasses
import re

import numpy as np
import pytest
from shoal_lab.loopback.fleet import BROKER_URL, LoopbackError

from shoal.protocol.channels import CHANNELS, Party
from shoal.simulation.process_fleet import Stage
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.documents import text_of
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    events,
    grouped_data,
    make_fleet,
    names,
    thetas,
)
from tests.helpers.owner_models import reader_of
from tests.helpers.tasks import logistic_bundle
from tests.scenarios.hostile.lying_devices import SIGNED, Scene, lies_of, one_lie_of, paths

PAGE = "docs/threat-model.md"
KINDS = ("checkable", "limited", "suspect")
VECTORS = ("update vector", "statistics vector", "checkpoint vector")
UNASKED = {"ModelsHeld", "SealedCheckpoints", "SealedState", "UploadPart", "KeeperShare", "Figures"}
"""Messages that no device of the plain scene sends."""
NOT_SAID = {"Presence.held", "Presence.vitals", "KeeperShare.figures"}
"""Fields whose only false values are those of the fields in them."""
GROUPS_OF_TWO = {"settings": {"groups": "2", "eta_g": "0.1"}}
ASKED = {
    "Upload.model_norm": {"algorithm": "fedgroup", **GROUPS_OF_TWO},
    "Upload.nearest": {"algorithm": "fesem", "settings": {"k": "2"}},
    "Upload.margins": {"algorithm": "cfl", "rounds": 12},
    "statistics vector": {},
}
"""Fields that only some runs ask for, with the options of such a run."""
FEATURES = DataDeclaration(
    features=tuple(f"f{i}" for i in range(INPUTS)), low=(-10,) * INPUTS, high=(10,) * INPUTS, standardise="federated"
)
PARTS = [row for row in paths() if row.startswith("UploadPart.")]
PARTED_INPUTS = 40
"""Inputs of a model that is long enough for two workers."""
COUNTS, PLACES = (3, 7, 12), ("first", "middle", "last")
WORST_ACCURACY = 0.05
"""Most that an honest device's model may lose by one liar, on the data of all honest devices."""


def table():
    """Return field -> class of the table in the threat model."""
    section = text_of(PAGE).split("### Fields that a device signs\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (`.+?) \| (\w+) \| (.+?) \|$", section, re.MULTILINE)
    found = {}
    for cell, kind, _ in rows:
        owner = ""
        for name in re.findall(r"`([^`]+)`", cell):
            owner = name.split(".")[0] if "." in name and not name.startswith(".") else owner
            row = f"{owner}{name}" if name.startswith(".") else name
            assert row not in found, row
            found[row] = kind
    return found


ROWS = [row for row in paths() if row.split(".")[0] not in UNASKED and row not in NOT_SAID] + ["update vector"]


def test_threat_model_has_each_signed_field():
    """A new field, or a new message that devices sign, needs a row in the table, and so a lie in the matrix."""
    found = table()
    assert set(found.values()) == set(KINDS)
    assert set(found) == paths().keys() | set(VECTORS)


def test_each_message_of_device_is_in_matrix():
    """Those that stand inside of others (statements and checkpoints) are documents of their own, and listed as well."""
    sent = {c.message.removeprefix("signed ").split(",")[0] for c in CHANNELS if c.sender is Party.DEVICE}
    assert sent <= {message.__name__ for message in SIGNED}


def place_of(place, count):
    return {"first": 0, "middle": count // 2, "last": count - 1}[place]


def accuracy(theta, data):
    """Return the accuracy of a logistic model (d,) on the data of some devices."""
    x, y = (np.concatenate(parts) for parts in zip(*((d.x, d.y) for d in data), strict=True))
    inputs, classes = x.shape[1], len(theta) // (x.shape[1] + 1)
    weight, bias = theta[: inputs * classes].reshape(inputs, classes), theta[inputs * classes :]
    return float(((x @ weight + bias).argmax(1) == y).mean())


@pytest.fixture(scope="session")
def honest_accuracy(tmp_path_factory, once):
    """Return a function count -> accuracy of what an honest fleet ends with; each fleet runs once."""

    def run(count):
        root = tmp_path_factory.mktemp("honest") / "fleet"
        with make_fleet(root, count=count, rounds=6, min_contributors=2) as fleet:
            fleet.run(100)
            theta = np.frombuffer(thetas(fleet)["dev-00"], np.float32)
        return accuracy(theta, grouped_data(count).values())

    return lambda count: once(f"honest fleet of {count}", lambda: run(count))


def assert_only_the_liar_pays(scene, expected):
    """The liar alone is named, as the table says, and the models of the others are as good as ever."""
    assert_named_as_listed(scene)
    data = [batch for name, batch in grouped_data(len(scene.all)).items() if name in scene.honest]
    models = {name: np.frombuffer(theta, np.float32) for name, theta in thetas(scene.fleet).items()}
    honest = [models[name] for name in scene.honest]
    assert len({theta.tobytes() for theta in honest}) == 1
    assert accuracy(honest[0], data) > expected - WORST_ACCURACY


def assert_named_as_listed(scene):
    """Honest devices were never blamed or left out, and the liar is named as the table says."""
    classes, liar = table(), scene.liar.name
    for told in scene.found:
        lie, said = told.saying.lie, (told.saying.lie.row, told.saying.lie.name, told.named, told.missing)
        assert set(told.named) <= {liar}, said
        assert set(told.missing) <= {liar}, said
        seen = bool(told.named or told.missing)
        if classes[lie.row] == "checkable" or not told.saying.readable:
            # One that is too large for its channel is dropped before it is known who has signed it.
            assert seen or not told.saying.fits, said
        elif classes[lie.row] == "suspect":
            assert not seen or not told.saying.fits, said


GROUPS = sorted({row.split(".")[0] for row in ROWS})


@pytest.mark.parametrize("group", GROUPS)
def test_one_lie_about_each_field(tmp_path, honest_accuracy, group):
    rows = [row for row in ROWS if row.split(".")[0] == group]
    with Scene(tmp_path / "fleet", 2, [one_lie_of(row) for row in rows], count=5) as scene:
        scene.play()
        assert {told.saying.lie.row for told in scene.found} == set(rows)
        assert_only_the_liar_pays(scene, honest_accuracy(5))


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("row", ROWS)
def test_every_lie(tmp_path, honest_accuracy, row, count, place):
    with Scene(tmp_path / "fleet", place_of(place, count), lies_of(row), count=count) as scene:
        scene.play()
        assert scene.found
        assert_only_the_liar_pays(scene, honest_accuracy(count))
        named = {bool(t.named or t.missing) for t in scene.found if t.saying.fits and t.saying.readable}
        # Which of its states a device names first depends on the round.
        if table()[row] == "limited" and row not in ASKED and not row.startswith("HeldState."):
            assert named != {True}, "a row whose every false value is named is checkable"


def asking_scene(root, row, lie, count, place):
    """Return a scene in which devices are asked for a field, and its liar says something false whenever it is.

    What is not asked for is empty or 0, but 0 may also be the nearest model.
    """
    bundle = logistic_bundle(INPUTS, CLASSES)
    if row == "statistics vector":
        bundle = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, data=FEATURES))
    asked = dataclasses.replace(
        lie, make=lambda true, *rest: lie.make(true, *rest) if np.any(true) or row == "Upload.nearest" else None
    )
    options = {"rounds": 5, **ASKED[row]}
    return Scene(root, place, [asked], count=count, data=grouped_data(count, groups=2), bundle=bundle, **options)


def refused_lie(row):
    return next(lie for lie in lies_of(row) if lie.name in ("NaN", "largest"))


@pytest.mark.parametrize("row", ASKED)
def test_lie_about_an_optional_field(tmp_path, row):
    """A lie about a field that only some runs ask for."""
    lie = refused_lie(row)
    with asking_scene(tmp_path / "fleet", row, lie, 5, 2) as scene:
        scene.live()
        (told,) = scene.found
        assert told.named == {scene.liar.name: told.named[scene.liar.name]}
        assert_named_as_listed(scene)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("row", ASKED)
def test_every_lie_about_an_optional_field(tmp_path, row, count, place):
    """Every lie about a field that only some runs ask for."""
    told = 0
    for i, lie in enumerate(lies_of(row)):
        with asking_scene(tmp_path / f"fleet-{i}", row, lie, count, place_of(place, count)) as scene:
            told += len(scene.live())
            assert_named_as_listed(scene)
    assert told >= 2


CHECKPOINTS = [
    *(row for row in paths() if row.split(".")[0] in ("SealedCheckpoints", "SealedState")),
    "checkpoint vector",
]


@pytest.mark.parametrize(
    "row", [r if r == "SealedState.digest_key" else pytest.param(r, marks=pytest.mark.long) for r in CHECKPOINTS]
)
def test_owner_is_told_of_false_checkpoint(tmp_path, row):
    """In the final round all three devices seal the model."""
    told = 0
    for i, lie in enumerate(lies_of(row)):
        with Scene(tmp_path / str(i), i % 3, [lie], rounds=2, mode="rotation") as scene:
            found = scene.live()
            if not found:
                continue
            told += 1
            reader = reader_of(scene.fleet)
            assert reader.finished_run().models[0].theta.tobytes() in {thetas(scene.fleet)[n] for n in scene.honest}
            named = {name for name in scene.all if name in " ".join(reader.doubts())} | found[0].named.keys()
            assert named == {scene.liar.name}, lie
    assert told


def test_one_lie_about_each_field_of_a_part(tmp_path):
    """Parts go to the workers of a sharded aggregator; the device whose part is refused is missing."""
    data = grouped_data(5, inputs=PARTED_INPUTS)
    bundle, lies = logistic_bundle(PARTED_INPUTS, CLASSES), [one_lie_of(row) for row in PARTS]
    with Scene(tmp_path / "fleet", 2, lies, data=data, bundle=bundle, count=5, shards=2) as scene:
        scene.play()
        assert {told.saying.lie.row for told in scene.found} == set(PARTS)
        assert_named_as_listed(scene)


SPOILING = ("KeeperShare.pad", "Upload.checks", "update vector")
"""What makes a sum of a run with a keeper noise, or its codes wrong."""
SHARED = [
    row for row in paths() if row.split(".")[0] in ("KeeperShare", "Figures") and row not in (*NOT_SAID, *SPOILING)
]


@pytest.fixture(scope="module")
def keeper_stage(tmp_path_factory):
    """Return a function root -> the directories of a fleet of twelve with a keeper."""
    stage = Stage(tmp_path_factory.mktemp("keeper") / "stage", BROKER_URL, names(12), keeper="keeper")
    return stage.copy_to


def keeper_scene(root, stage, lies, **options):
    # After a refused upload the liar misses the next round too.
    options = {"rounds": 4 * len(lies) + 2, "mode": "rotation", "min_contributors": 3, "deadline_s": 5.0, **options}
    return Scene(root / "fleet", 5, lies, count=12, stage=stage(root / "stage"), **options)


def assert_one_group_pays(scene, expected):
    """Honest devices have one model, as good as without the liar, and at most a group of five is left out."""
    data = grouped_data(12)
    out = {name for e in events(scene.fleet.records(), "group-left-out") for name in e["devices"]}
    assert not out or (scene.liar.name in out and len(out) <= 5)
    honest = {theta for name, theta in thetas(scene.fleet).items() if name in scene.honest}
    assert len(honest) == 1
    theta = np.frombuffer(honest.pop(), np.float32)
    assert accuracy(theta, [data[name] for name in scene.honest]) > expected - WORST_ACCURACY
    return out


def lost_rounds(scene):
    """Return how many rounds changed no model."""
    return sum(not r["contributed"] for r in scene.fleet.records()[:-1])


@pytest.mark.parametrize("owner", ["KeeperShare", "Figures"])
def test_one_lie_about_each_field_of_a_share(tmp_path, keeper_stage, honest_accuracy, owner):
    rows = [row for row in SHARED if row.split(".")[0] == owner]
    with keeper_scene(tmp_path, keeper_stage, [one_lie_of(row) for row in rows]) as scene:
        scene.play(2000)
        assert {told.saying.lie.row for told in scene.found} == set(rows)
        assert_named_as_listed(scene)
        assert not assert_one_group_pays(scene, honest_accuracy(12))
        assert lost_rounds(scene) == 0


@pytest.mark.long
@pytest.mark.parametrize("row", SHARED)
def test_every_lie_about_a_share(tmp_path, keeper_stage, honest_accuracy, row):
    with keeper_scene(tmp_path, keeper_stage, lies_of(row)) as scene:
        scene.play(4000)
        assert scene.found
        assert_named_as_listed(scene)
        assert not assert_one_group_pays(scene, honest_accuracy(12))


SPOILT = [
    pytest.param(lie, id=f"{row}-{lie.name}", marks=() if lie.name in ("reversed", "empty") else pytest.mark.long)
    for row in SPOILING
    for lie in lies_of(row)
]


@pytest.mark.parametrize("lie", SPOILT)
def test_one_who_spoils_sums_costs_a_group(tmp_path, keeper_stage, honest_accuracy, lie):
    """The liar lies in every round: the search ends with a group that has it, after at most sixteen rounds, half of them lost."""
    with keeper_scene(tmp_path, keeper_stage, [lie], rounds=18) as scene:
        (told,) = scene.live(4000)
        out = assert_one_group_pays(scene, honest_accuracy(12))
        # What is no update at all is refused before it is in a sum.
        assert out or told.missing == [scene.liar.name]
        assert lost_rounds(scene) <= 8


def test_fleet_that_needs_all_names_the_liar(tmp_path):
    """A fleet that needs all three waits and names the liar."""
    lies = [lie for lie in lies_of("Upload.samples") if lie.name == "largest"]
    with Scene(tmp_path / "fleet", 1, lies, count=3, min_contributors=3) as scene:
        scene.liar.lie = lies[0]
        with pytest.raises(LoopbackError, match=r"upload refused: dev-01$"):
            scene.fleet.run(300)
        assert [d.name for d in scene.status().devices if d.reason] == ["dev-01"]
