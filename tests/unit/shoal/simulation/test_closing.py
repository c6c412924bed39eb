"""An object is closed at the end of its ``with`` statement."""

import pytest

from shoal.simulation.closing import Closing


class Kept(Closing):
    closed = 0

    def close(self):
        self.closed += 1


def test_a_block_closes_also_on_an_error():
    with Kept() as kept:
        assert not kept.closed
    with pytest.raises(ValueError, match="within"), kept:
        raise ValueError("within")
    assert kept.closed == 2
