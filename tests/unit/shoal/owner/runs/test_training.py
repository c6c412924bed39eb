"""Local training by names and values on top of a task's defaults."""

import dataclasses

import pytest

from aggregator.strategies.base import AUTO
from aggregator.strategies.registry import STRATEGIES
from shoal.errors import UsageError
from shoal.owner.runs.training import describe, local_training
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


# -- The text about algorithms agrees with the strategies' docstrings --


def test_every_algorithm_is_described():
    """Every algorithm is described with every setting and its default."""
    texts = describe()
    assert [t.partition(":")[0] for t in texts] == list(STRATEGIES)
    for text, strategy in zip(texts, STRATEGIES.values(), strict=True):
        for setting in dataclasses.fields(strategy.settings_type):
            default = setting.default
            if isinstance(default, bool):
                default = "on" if default else "off"
            elif setting.name == strategy.settings_type.clusters_setting and default == AUTO:
                default = "auto"
            assert f" {setting.name}={default}" in text
            assert f"{setting.name}" in text.partition("\n")[2].partition("\n")[2], f"{setting.name} is not explained"
    assert "(no settings)" in texts[list(STRATEGIES).index("local")]
