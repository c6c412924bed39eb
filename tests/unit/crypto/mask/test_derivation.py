"""Derivation of mask keys: their inputs, refused values, and secrecy in repr and pickle."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from crypto.mask.derivation import MaskContext, derive, key_id
from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.types import Segment

SECRET = MaskSecret.from_bytes(bytes(range(32)))
CONTEXT = MaskContext(
    fleet="plant-7",
    run_id=b"run-0001",
    key_version=3,
    task_digest=bytes(range(100, 132)),
    mode="permutation",
    segments=(Segment("shared", 60), Segment("cluster", 40)),
)
OTHERS = {
    "fleet": {"fleet": "plant-8"},
    "run": {"run_id": b"run-0002"},
    "key version": {"key_version": 4},
    "round": {"round": 1},
    "task": {"task_digest": bytes(32)},
    "segments": {"segments": (Segment("shared", 40), Segment("cluster", 60))},
    "names": {"segments": (Segment("cluster", 60), Segment("shared", 40))},
}


def permuted(context: MaskContext, secret: MaskSecret = SECRET) -> list[float]:
    key = derive(secret, context)
    return [float(value) for value in mask(np.arange(key.length, dtype=np.float32), key).values]


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_each_part_of_the_context_counts(change: dict[str, object]) -> None:
    """Each part of the context changes key id and permutation."""
    other = dataclasses.replace(CONTEXT, **change)  # type: ignore[arg-type]
    assert len(key_id(SECRET, other)) == 16
    assert key_id(SECRET, other) != key_id(SECRET, CONTEXT)
    assert permuted(other) != permuted(CONTEXT)


def test_another_secret_changes_everything() -> None:
    """Another secret changes key id and permutation."""
    other = MaskSecret.from_bytes(bytes(32))
    assert key_id(other, CONTEXT) != key_id(SECRET, CONTEXT)
    assert permuted(CONTEXT, other) != permuted(CONTEXT)


def test_equal_segments_differ() -> None:
    """The two segments of a vector never share a permutation."""
    values = permuted(dataclasses.replace(CONTEXT, segments=(Segment("shared", 50), Segment("cluster", 50))))
    assert values[:50] != [value - 50 for value in values[50:]]


def test_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'rot13'") as caught:
        dataclasses.replace(CONTEXT, mode="rot13")
    for name in MODES:
        assert name in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": b""},
        {"run_id": bytes(65)},
        {"key_version": -1},
        {"round": 1 << 63},
        {"task_digest": bytes(31)},
        {"segments": ()},
        {"segments": (Segment("cluster", 4), Segment("cluster", 4))},
        {"segments": (Segment("cluster", limits.MAX_COORDINATES), Segment("shared", 1))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_bad_context_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(CONTEXT, **change)  # type: ignore[arg-type]


def test_a_bad_fleet_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="fleet"):
        dataclasses.replace(CONTEXT, fleet="Plant 7")


@pytest.mark.parametrize("mode", MODES)
def test_a_key_shows_no_secret_and_no_index(mode: str) -> None:
    """Neither the secret's bytes nor any array appears in the repr of a key or of its transforms."""
    key = derive(SECRET, dataclasses.replace(CONTEXT, mode=mode))
    shown = f"{key} {key!r} {key.transforms!r}"
    assert SECRET.reveal().hex() not in shown
    assert "array" not in shown
    assert "redacted" in repr(key)


def test_a_key_can_not_be_pickled() -> None:
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(derive(SECRET, CONTEXT))
