"""All attacks, in the order of the report. A new attack is a module of this package or of one below it, and an entry here."""

from __future__ import annotations

from typing import Final

from shoal_lab.bench.attacks import (
    broker,
    collusion,
    first_layer,
    gradient_matching,
    gram_matching,
    identification,
    known_mean,
    known_pair,
    label_counts,
    layer_statistics,
    membership,
    pixel_values,
    probing,
    shadow_matching,
)
from shoal_lab.bench.attacks.base import Attack
from shoal_lab.bench.attacks.features import rows
from shoal_lab.bench.attacks.past import restored, rounds
from shoal_lab.bench.attacks.structure import active, images, independence, linking, passive

ATTACKS: Final[tuple[Attack, ...]] = (
    label_counts.ATTACK,
    first_layer.ATTACK,
    gradient_matching.ATTACK,
    pixel_values.ATTACK,
    membership.ATTACK,
    layer_statistics.ATTACK,
    shadow_matching.ATTACK,
    known_pair.ATTACK,
    known_mean.ATTACK,
    gram_matching.ATTACK,
    identification.ATTACK,
    probing.ATTACK,
    collusion.ATTACK,
    broker.ATTACK,
    active.ATTACK,
    passive.ATTACK,
    images.ATTACK,
    linking.ATTACK,
    independence.ATTACK,
    rows.ATTACK,
    rounds.PAST,
    rounds.SINCE,
    restored.ATTACK,
)
