"""The nearest of several models to one that the device has trained, by distance or by direction.

Strategies assign devices by it, since only devices hold models that were masked under different keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from shoal.types import Float32Vector

BLOCK: Final = 1 << 16
"""Coordinates that are compared at a time, so that no float64 copy of a whole model is made."""


def nearest_model(own: int, delta: Float32Vector, compare: Collection[int], models: Mapping[int, Float32Vector]) -> int:
    """Return the model with the least l2 distance from ``models[own] + delta``, measured in float64.

    Args:
        own: the model that the device trained from; at a tie it is chosen, if it is compared, else the smallest id.
        delta: shape (d,), float32, the update.
        compare: ids of the models to compare with, at least one.
        models: theta (d,), float32, of ``own`` and all of ``compare``.
    """
    apart = {model: _squared_distance(models[own], delta, models[model]) for model in compare}
    return min(apart, key=lambda model: (apart[model], model != own, model))


def nearest_direction(
    start: int, delta: Float32Vector, compare: Collection[int], models: Mapping[int, Float32Vector]
) -> int:
    """Return the model whose difference from ``models[start]`` has the largest cosine with ``delta``, measured in float64.

    Args:
        start: the model that the device trained from.
        delta: shape (d,), float32, the update.
        compare: ids of the models to compare with, at least one. One that equals ``models[start]`` has cosine 0. At a tie the
            smallest id is chosen.
        models: theta (d,), float32, of ``start`` and all of ``compare``.
    """
    cosines = {model: _scaled_cosine(delta, models[start], models[model]) for model in compare}
    return min(cosines, key=lambda model: (-cosines[model], model))


def _scaled_cosine(delta: Float32Vector, start: Float32Vector, other: Float32Vector) -> float:
    """Return the cosine of ``delta`` and ``other - start``, times the length of ``delta``."""
    product = squared = 0.0
    for at in range(0, len(delta), BLOCK):
        block = slice(at, at + BLOCK)
        apart = np.subtract(other[block], start[block], dtype=np.float64)
        product += float(np.dot(apart, delta[block].astype(np.float64)))
        squared += float(np.dot(apart, apart))
    return product / squared**0.5 if squared else 0.0


def _squared_distance(start: Float32Vector, delta: Float32Vector, other: Float32Vector) -> float:
    """Return |start + delta - other|^2."""
    total = 0.0
    for at in range(0, len(delta), BLOCK):
        block = slice(at, at + BLOCK)
        apart = np.subtract(start[block], other[block], dtype=np.float64) + delta[block]
        total += float(np.dot(apart, apart))
    return total
