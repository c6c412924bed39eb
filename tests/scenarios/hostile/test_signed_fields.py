"""The matrix of lies: a rostered device signs each of its fields falsely, and costs itself alone.

docs/threat-model.md has a table of all fields that a device signs, each of one class. The class is what the owner learns:

- checkable: whoever signs a false value is named;
- limited: values beyond a limit are refused and their device named, those within have a bounded effect;
- suspect: nobody can check the value, and its effect is bounded.

A message that can't be decoded names its signer, whatever the field's class.
"""

import re

import numpy as np
import pytest

from shoal.protocol.channels import CHANNELS, Party
from shoal.simulation.loopback_fleet import LoopbackError
from tests.helpers.documents import text_of
from tests.helpers.falsehoods import fields_of
from tests.helpers.fleets import grouped_data, make_fleet, thetas
from tests.helpers.lying_devices import SIGNED, Scene, lies_of, one_lie_of, paths

PAGE = "docs/threat-model.md"
CLASSES = ("checkable", "limited", "suspect")
VECTORS = ("update vector", "statistics vector", "checkpoint vector")
UNASKED = {"SealedCheckpoints", "SealedState", "UploadPart"}
"""Messages that no device of the plain scene sends."""
NOT_SAID = {"Presence.vitals", "Presence.wire"}
"""Fields of a presence whose only false values are those of the fields in them."""
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


def test_the_threat_model_classifies_each_signed_field():
    """A new field, or a new message that devices sign, needs a row in the table, and so a lie in the matrix."""
    found = table()
    assert set(found.values()) == set(CLASSES)
    expected = {field for message in SIGNED for field in fields_of(message)}
    assert set(found) == expected | set(VECTORS)


def test_each_message_of_a_device_is_in_the_matrix():
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
def honest_accuracy(tmp_path_factory):
    """Return a function count -> accuracy of what an honest fleet ends with; each fleet runs once."""
    known = {}

    def found(count):
        if count not in known:
            root = tmp_path_factory.mktemp("honest") / "fleet"
            with make_fleet(root, count=count, rounds=6, min_contributors=2) as fleet:
                fleet.run(100)
                theta = np.frombuffer(thetas(fleet)["dev-00"], np.float32)
            known[count] = accuracy(theta, grouped_data(count).values())
        return known[count]

    return found


def assert_only_the_liar_pays(scene, expected):
    """Honest devices were never blamed or left out, the liar is named as the table says, and the models are as good as ever."""
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
    data = [batch for name, batch in grouped_data(len(scene.all)).items() if name != liar]
    models = {name: np.frombuffer(theta, np.float32) for name, theta in thetas(scene.fleet).items() if name != liar}
    assert len({theta.tobytes() for theta in models.values()}) == 1
    assert accuracy(models[scene.honest[0]], data) > expected - WORST_ACCURACY


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
        if table()[row] == "limited":
            assert named != {True}, "a row whose every false value is named is checkable"


def test_a_fleet_that_needs_all_three_waits_and_names_the_liar(tmp_path):
    lies = [lie for lie in lies_of("Upload.samples") if lie.name == "largest"]
    with Scene(tmp_path / "fleet", 1, lies, count=3, min_contributors=3) as scene:
        scene.liar.lie = lies[0]
        with pytest.raises(LoopbackError, match=r"upload refused: dev-01$"):
            scene.fleet.run(300)
        assert [d.name for d in scene.status().devices if d.reason] == ["dev-01"]
