"""Local training by names and values on top of a task's defaults."""

import pytest

from shoal.errors import UsageError
from shoal.owner.runs.training import local_training
from shoal.protocol.recipe import LocalTraining


def test_values_take_the_place_of_defaults():
    """The rest stays."""
    assert local_training(LocalTraining(lr=0.3), {"epochs": "4", "clip": "1.5"}) == LocalTraining(
        lr=0.3, epochs=4, clip=1.5
    )


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ({"rate": "1"}, "local training has no 'rate'"),
        ({"epochs": "1.5"}, "epochs is a whole number from 0 to 2147483648, not '1.5'"),
        ({"momentum": "1"}, "momentum is a number of at least 0 and below 1, not"),
        ({"batch_size": "0"}, "batch_size=0 and steps=0 trains nothing"),
        ({"epochs": "0"}, "epochs=0 and steps=0 trains nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(pairs, text):
    with pytest.raises(UsageError, match=text):
        local_training(LocalTraining(), pairs)
