"""All attacks, in the order of the report. A new one is a function of one of these modules, and an entry in its ``ATTACKS``."""

from __future__ import annotations

from typing import Final

from shoal_lab.bench.attacks import broker, contents, features, insiders, invariants, past, places
from shoal_lab.bench.attacks.base import Attack
from shoal_lab.bench.attacks.structure import coordinates, images, linking

ATTACKS: Final[tuple[Attack, ...]] = (
    *contents.ATTACKS,
    *places.ATTACKS,
    *invariants.ATTACKS,
    *insiders.ATTACKS,
    *broker.ATTACKS,
    *coordinates.ATTACKS,
    *images.ATTACKS,
    *linking.ATTACKS,
    coordinates.COMPONENT_ANALYSIS,
    *features.ATTACKS,
    *past.ATTACKS,
)
