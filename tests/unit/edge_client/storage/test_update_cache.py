"""A device's cache of its own updates for later mask epochs: its contents, their lifetime and their number."""

import stat

import numpy as np
import pytest

from edge_client.storage.update_cache import MOST_KEPT, UpdateCache, wanted
from shoal.protocol.documents import Capabilities
from tests.helpers.plans import D, run_plan

KEEPING = Capabilities(keep_updates=True)
PLAN = run_plan("cfl", epoch_rounds=5, capabilities=KEEPING)
RNG = np.random.default_rng(2)
UPDATES = [RNG.standard_normal(D).astype(np.float32) for _ in range(4)]


def files(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"capabilities": KEEPING, "epoch_rounds": 5}, True),
        ({"capabilities": KEEPING, "epoch_rounds": 20}, False),
        ({"capabilities": Capabilities(), "epoch_rounds": 5}, False),
    ],
)
def test_earlier_updates_are_needed_in_runs_of_several_epochs_that_allow_it(changes, expected):
    assert wanted(run_plan(**changes)) == expected


def test_the_newest_is_at_hand_and_leaves_no_file(tmp_path):
    own = UpdateCache(tmp_path, PLAN)
    own.note(3, UPDATES[0])
    assert own.find(3) is UPDATES[0]
    assert own.find(2) is None
    assert files(tmp_path) == []


def test_a_cached_update_survives_the_next_round_and_a_restart(tmp_path):
    own = UpdateCache(tmp_path, PLAN)
    own.note(3, UPDATES[0])
    own.keep(3)
    own.note(4, UPDATES[1])
    assert own.find(3).tobytes() == UPDATES[0].tobytes()
    again = UpdateCache(tmp_path, PLAN)
    assert again.find(3).tobytes() == UPDATES[0].tobytes()
    assert again.find(4) is None, "the newest was not asked to be kept"
    assert stat.S_IMODE((tmp_path / "own-000003.bin").stat().st_mode) == 0o600


def test_only_the_newest_update_can_be_cached(tmp_path):
    """The assignment names a round: an update of another round must not be cached for it."""
    own = UpdateCache(tmp_path, PLAN)
    own.keep(1)
    own.note(4, UPDATES[0])
    own.keep(3)
    assert files(tmp_path) == []
    assert own.find(3) is None


def test_a_cached_update_is_not_overwritten(tmp_path):
    own = UpdateCache(tmp_path, PLAN)
    own.note(3, UPDATES[0])
    own.keep(3)
    own.note(3, UPDATES[1])
    own.keep(3)
    assert UpdateCache(tmp_path, PLAN).find(3).tobytes() == UPDATES[0].tobytes()


def test_another_runs_updates_go(tmp_path):
    own = UpdateCache(tmp_path, PLAN)
    own.note(3, UPDATES[0])
    own.keep(3)
    UpdateCache(tmp_path, PLAN)
    assert files(tmp_path) == ["own-000003.bin"]
    UpdateCache(tmp_path, run_plan("cfl", run_id=b"x" * 16))
    assert files(tmp_path) == []


@pytest.mark.parametrize("cut", [0, 3, 30, -1])
def test_a_damaged_file_is_dropped_and_stops_nothing(tmp_path, caplog, cut):
    own = UpdateCache(tmp_path, PLAN)
    own.note(3, UPDATES[0])
    own.keep(3)
    path = tmp_path / "own-000003.bin"
    path.write_bytes(path.read_bytes()[:cut])
    assert UpdateCache(tmp_path, PLAN).find(3) is None
    assert files(tmp_path) == []
    assert "is damaged" in caplog.text


def test_an_aggregator_that_asks_for_every_update_does_not_fill_the_disk(tmp_path, caplog):
    """Each assignment may name a round; a tree of clusters has far fewer levels than this."""
    own = UpdateCache(tmp_path, PLAN)
    for round_ in range(1, MOST_KEPT + 10):
        own.note(round_, UPDATES[0])
        own.keep(round_)
    assert len(files(tmp_path)) == MOST_KEPT
    assert own.find(1) is not None, "the oldest, which the root's cut needs, stay"
    assert "no more updates are kept" in caplog.text
