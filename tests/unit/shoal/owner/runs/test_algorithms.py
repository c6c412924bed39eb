"""The text about algorithms agrees with the strategies' docstrings."""

import dataclasses

from aggregator.strategies.base import AUTO
from aggregator.strategies.registry import STRATEGIES
from shoal.owner.runs.training import describe


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


def test_algorithms_without_settings_say_so():
    assert "(no settings)" in next(t for t in describe() if t.startswith("local:"))
