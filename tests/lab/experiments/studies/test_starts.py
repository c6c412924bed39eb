"""What is reported of random starts, broadcasts and pure clusters."""

import pytest
from shoal_lab.experiments.studies.watch import pure_from, starts_of

from aggregator.strategies.base import Event


def test_starts_are_read_off_the_events():
    events = [
        (0, Event(3, "start-ended", {"start": 0, "loss": 2.0})),
        (0, Event(6, "start-ended", {"start": 1, "loss": 1.0})),
        (3, Event(6, "start-kept", {"start": 1})),
        (7, Event(10, "broadcast-narrowed", {})),
        (8, Event(11, "split", {})),
    ]
    found = starts_of(events)
    assert [e["loss"] for e in found["starts"]] == [2.0, 1.0]
    assert (found["start_kept"], found["broadcasts"]) == (1, [{"round": 7, "kind": "broadcast-narrowed"}])
    assert starts_of([]) == {}


@pytest.mark.parametrize(
    ("purities", "expected"),
    [([1.0, 0.5, 0.5, 1.0, 1.0], 4), ([1.0, 1.0], 1), ([0.5, 1.0, 0.5], None), ([None, 1.0], 2), ([1.0, 0.75], None)],
)
def test_pure_counts_after_the_last_impure(purities, expected):
    """A round in which they were pure for a while does not count, nor does one without clusters."""
    assert pure_from(list(enumerate(purities, 1))) == expected
