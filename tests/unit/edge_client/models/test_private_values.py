"""Private values on disk: each round trains them once, whatever is repeated, and damage is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.models.private_values import PRIVATE_FILE, PrivateValues, erase, initial_values, joined
from edge_client.models.store import FOLDER
from shoal.errors import ConfigError, TaskError
from tests.helpers.tasks import CLASSES, logistic_bundle

RUN, OTHER = b"r" * 16, b"o" * 16
INITIAL = np.array([1.0, 2.0, 3.0], np.float32)


def opened(folder, run_id=RUN, initial=INITIAL):
    return PrivateValues(folder, run_id, initial)


def test_trained_values_go_on(tmp_path):
    """Values begin with the tasks and go on with the trained ones."""
    values = opened(tmp_path)
    assert values.newest is values.at(1) is INITIAL
    values.keep(1, INITIAL + 1)
    for found in (values, opened(tmp_path)):
        np.testing.assert_array_equal(found.newest, INITIAL + 1)
        np.testing.assert_array_equal(found.at(1), INITIAL)
        np.testing.assert_array_equal(found.at(2), INITIAL + 1)
    path = tmp_path / FOLDER / PRIVATE_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) > 32 + 2 * INITIAL.nbytes


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_each_round_is_trained_once(tmp_path_factory, story):
    """Training adds the round's number: after n rounds the values are the sum of 1 to n, however often one was repeated."""
    folder = tmp_path_factory.mktemp("device")
    values, expected = opened(folder), INITIAL
    for round_, (repeated, killed) in enumerate(story, start=1):
        for _ in range(1 + repeated):
            values.keep(round_, values.at(round_) + np.float32(round_))
            values = opened(folder) if killed else values
        expected = expected + np.float32(round_)
    np.testing.assert_array_equal(values.newest, expected)


def test_another_run_begins_with_the_tasks(tmp_path):
    """Another run begins with the tasks values."""
    opened(tmp_path).keep(4, INITIAL + 1)
    np.testing.assert_array_equal(opened(tmp_path, OTHER).newest, INITIAL)
    erase(tmp_path)
    assert not (tmp_path / FOLDER / PRIVATE_FILE).exists()
    erase(tmp_path)
    np.testing.assert_array_equal(opened(tmp_path).newest, INITIAL)


def test_unremovable_file_is_an_error(tmp_path):
    """A file that can't be removed is an error."""
    (tmp_path / FOLDER / PRIVATE_FILE).mkdir(parents=True)
    with pytest.raises(ConfigError, match="can't write"):
        erase(tmp_path)


def test_damage_begins_again_and_is_reported(tmp_path, caplog):
    opened(tmp_path).keep(4, INITIAL + 1)
    path = tmp_path / FOLDER / PRIVATE_FILE
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:-40] + b"\0" * 40, data[:9] + b"\xff" + data[10:]):
        caplog.clear()
        path.write_bytes(damaged)
        np.testing.assert_array_equal(opened(tmp_path).newest, INITIAL)
        assert "private values are lost" in caplog.text
    path.write_bytes(data)
    np.testing.assert_array_equal(opened(tmp_path).newest, INITIAL + 1)
    caplog.clear()
    np.testing.assert_array_equal(opened(tmp_path, initial=INITIAL[:2]).newest, INITIAL[:2])
    assert "twice 2 coordinates" in str(caplog.records[0].kv)


def test_readable_file_is_refused(tmp_path):
    """A file that others can read is refused."""
    opened(tmp_path).keep(1, INITIAL)
    (tmp_path / FOLDER / PRIVATE_FILE).chmod(0o644)
    with pytest.raises(ConfigError):
        opened(tmp_path)


def test_without_private_values_no_file(tmp_path):
    """A task without private parameters has no file."""
    initial = initial_values(logistic_bundle())
    values = opened(tmp_path, initial=initial)
    values.keep(1, initial)
    assert values.newest.shape == (0,)
    assert not list(tmp_path.iterdir())
    theta = np.ones(4, np.float32)
    assert joined(theta, initial) is theta


def test_initial_values_are_finite():
    bundle = logistic_bundle(private=np.arange(CLASSES))
    np.testing.assert_array_equal(initial_values(bundle), np.arange(CLASSES, dtype=np.float32))
    with pytest.raises(TaskError, match="not finite"):
        initial_values(logistic_bundle(private=[1.0, np.nan, 0.0]))
