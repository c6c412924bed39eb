"""Read LEAF's JSON, in which samples belong to people (FEMNIST by writer, Sent140 by account)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.shares import NINETY_TEN, Shares, cut, population_of
from shoal_lab.experiments.data.datasets import locate
from shoal_lab.experiments.data.text import Vocabulary, words_of

T = TypeVar("T")

FEMNIST_PIXELS: Final = 28 * 28
FEMNIST_CLASSES: Final = 62
ALL_TRAIN: Final = Shares(1.0, 0.0, 0.0)
TWEET_WORDS: Final = 25
"""Number of tokens of a tweet that the LSTM of FedProx and FedGroup reads."""
VOCABULARY_SIZE: Final = 10_000
_POSITIVE: Final = {"0": 0, "1": 1, "4": 1}
"""Sent140 writes 0 for negative and 4 for positive; LEAF's own preprocessing writes 1 for positive."""
_TEXT_FIELD: Final = 4
"""Position of the text in a sample (id, date, query, account, text)."""
_DAMAGED: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(OverflowError, RecursionError, MemoryError),
)
"""Errors of reading a file that is cut off, or not what its name says."""


@dataclass(frozen=True, slots=True)
class Person:
    """One person's samples, as LEAF divided them.

    Attributes:
        name: the user's name in LEAF's file.
        train, test: x shape (n, ...), y shape (n,), int64; ``test`` may be empty.
    """

    name: str
    train: Shard
    test: Shard


def load_femnist(data_dir: Path | None = None) -> tuple[Person, ...]:
    """Return FEMNIST's writers: x (n, 784), float32 in [0, 1], 62 classes.

    Raises:
        MissingDataError: its files were not found.
        DataError: a file is damaged.
    """
    found = locate("femnist", data_dir)
    parts = [_people(found[part], _femnist_shard) for part in ("train/*.json", "test/*.json")]
    return _joined(*parts)


def load_sent140(
    data_dir: Path | None = None, *, words: int = TWEET_WORDS, vocabulary_size: int = VOCABULARY_SIZE
) -> tuple[tuple[Person, ...], Vocabulary]:
    """Return Sent140's accounts and the vocabulary: x (n, words), int64 token ids, y 0 (negative) or 1.

    The papers use frozen GloVe vectors, which are not part of the data set. Here a token is a word's rank among the most
    frequent words of all training tweets (0 pads in front, so that the last token is always a word; 1 is any other word), and
    the network learns or draws its own vectors. An experiment may pool word counts; a fleet would agree on a public list.

    Raises:
        MissingDataError: its files were not found.
        DataError: a file is damaged.
    """
    found = locate("sent140", data_dir)
    train, test = (_people(found[part], _tweets) for part in ("train/*.json", "test/*.json"))
    vocabulary = Vocabulary.of((w for texts, _ in train.values() for w in texts), vocabulary_size)

    def shards(people: dict[str, tuple[list[list[str]], NDArray[np.int64]]]) -> dict[str, Shard]:
        return {name: Shard(vocabulary.padded(texts, words), y) for name, (texts, y) in people.items()}

    return _joined(shards(train), shards(test)), vocabulary


def by_writer(people: Sequence[Person], *, devices: int | None = None, seed: int, least: int = 10) -> Population:
    """Make each person a device, with LEAF's own division into training and test samples.

    Args:
        people: from `load_femnist` or `load_sent140`.
        devices: number of people to draw from those with ``least`` samples; None takes all of these.
        seed: seed of that draw and of every split.
        least: fewest samples, in total, of a person.

    Raises:
        UsageError: there are too few people.
    """
    rng = np.random.default_rng(seed)
    able = [p for p in people if len(p.train) + len(p.test) >= least and len(p.train) > 0]
    count = len(able) if devices is None else devices
    if not 1 <= count <= len(able):
        raise UsageError(f"{count} devices need as many people with {least} samples; there are {len(able)}")
    chosen = able if devices is None else [able[int(i)] for i in np.sort(rng.permutation(len(able))[:count])]
    parts = []
    for person in chosen:
        # LEAF's division by user gives a person either training or test samples.
        alone = len(person.test) == 0
        order = rng.permutation(len(person.train))
        train, validation, test = cut(person.train.x, person.train.y, order, NINETY_TEN if alone else ALL_TRAIN)
        parts.append((train, validation, test if alone else person.test))
    return population_of(parts, None)


def _joined(train: dict[str, Shard], test: dict[str, Shard]) -> tuple[Person, ...]:
    """Join both parts by name; people who have test samples only (LEAF's division by user) are left out."""
    if not train:
        raise DataError("LEAF's files list no users")
    return tuple(
        Person(name, shard, test.get(name, Shard(shard.x[:0], shard.y[:0]))) for name, shard in sorted(train.items())
    )


def _people(paths: Sequence[Path], read: Callable[[list[Any], list[Any]], T]) -> dict[str, T]:
    """Read ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`` of every file."""
    people: dict[str, T] = {}
    for path in paths:
        user = None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            for user, promised in zip(document["users"], document["num_samples"], strict=True):
                x, y = document["user_data"][user]["x"], document["user_data"][user]["y"]
                if not len(x) == len(y) == promised:
                    raise ValueError(f"{len(x)} samples and {len(y)} labels, not the {promised} promised")
                if user in people:
                    raise ValueError("another file has this user, too")
                people[user] = read(x, y)
        except _DAMAGED as error:
            where = f"{path}, user {user!r}" if user is not None else f"{path}"
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise DataError(f"{where} can't be read as LEAF's JSON: {reason}", hint="is it cut off?") from None
    return people


def _femnist_shard(x: list[Any], y: list[Any]) -> Shard:
    pixels, labels = np.asarray(x, np.float32).reshape(len(y), FEMNIST_PIXELS), np.asarray(y, np.int64)
    if not np.isfinite(pixels).all() or (len(labels) and not 0 <= labels.min() <= labels.max() < FEMNIST_CLASSES):
        raise ValueError("a pixel or a label is out of range")
    return Shard(pixels, labels)


def _tweets(x: list[Any], y: list[Any]) -> tuple[list[list[str]], NDArray[np.int64]]:
    texts = [sample[_TEXT_FIELD] for sample in x if isinstance(sample, list)]
    if len(texts) != len(x):
        raise ValueError("a sample that isn't [id, date, query, account, text]")
    return [words_of(text) for text in texts], np.array([_POSITIVE[str(v)] for v in y], np.int64)
