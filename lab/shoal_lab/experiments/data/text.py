"""Data sets of what people write.

Text as tokens: words, a vocabulary of the most frequent ones, and AG-News as next-word prediction. LEAF's JSON, in which samples
belong to people: FEMNIST by writer, Sent140 by account.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.shares import CFL_SHARES, NINETY_TEN, Shares, cut, population_of
from shoal_lab.experiments.data.datasets import locate

PADDING: Final = 0
UNKNOWN: Final = 1
END: Final = 2
"""Token that ends an article. Tokens below 3 are not words."""
_SPECIAL: Final = 3
NEWS_VOCABULARY: Final = 5000
NEWS_WINDOW: Final = 30
MAX_FIELD_CHARACTERS: Final = 1 << 16
_WORD: Final = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[^\sa-z0-9]")


def words_of(text: str) -> list[str]:
    """Return the words of ``text`` in lower case; each punctuation mark counts as a word."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The most frequent words of some texts.

    Attributes:
        ids: word -> token, from 3 on, by falling frequency (ties by spelling).
    """

    ids: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[Sequence[str]], size: int) -> Vocabulary:
        """Return a vocabulary of at most ``size`` tokens, including the three special ones.

        Raises:
            UsageError: ``size`` leaves no room for a word.
        """
        if size <= _SPECIAL:
            raise UsageError(f"a vocabulary of {size} tokens holds no word")
        counts: Counter[str] = Counter()
        for words in texts:
            counts.update(words)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - _SPECIAL]
        return cls({word: token for token, (word, _) in enumerate(ranked, _SPECIAL)})

    def __len__(self) -> int:
        return len(self.ids) + _SPECIAL

    def tokens(self, words: Iterable[str]) -> list[int]:
        """Return the token of each word."""
        return [self.ids.get(word, UNKNOWN) for word in words]

    def padded(self, texts: Sequence[Sequence[str]], length: int) -> NDArray[np.int64]:
        """Return the first ``length`` tokens of each text, padded in front: shape (texts, length), int64."""
        rows = np.full((len(texts), length), PADDING, np.int64)
        for row, words in zip(rows, texts, strict=True):
            tokens = self.tokens(words[:length])
            if tokens:
                row[-len(tokens) :] = tokens
        return rows


@dataclass(frozen=True, slots=True)
class News:
    """AG-News: articles as words, with their topics.

    Attributes:
        articles: title and description, as words.
        topics: shape (articles,), int64: 0 world, 1 sports, 2 business, 3 science and technology.
    """

    articles: tuple[tuple[str, ...], ...]
    topics: NDArray[np.int64]


def load_news(data_dir: Path | None = None, *, part: str = "train") -> News:
    """Return the ``train`` or ``test`` articles of AG-News (CSV: class 1 to 4, title, description).

    Raises:
        MissingDataError: its files were not found.
        DataError: a file is damaged.
    """
    path = locate("ag-news", data_dir)[f"{part}.csv"][0]
    articles: list[tuple[str, ...]] = []
    topics: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                where = f"{path}, line {reader.line_num}"
                if len(cells) < 2 or max(map(len, cells)) > MAX_FIELD_CHARACTERS:
                    raise DataError(f"{where}: not class, title, description")
                if cells[0] not in ("1", "2", "3", "4"):
                    if not articles and not cells[0].strip().isdigit():
                        continue  # a header
                    raise DataError(f"{where}: class {cells[0][:20]!r} is not 1 to 4")
                articles.append(tuple(words_of(" ".join(cells[1:]).replace("\\", " "))))
                topics.append(int(cells[0]) - 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read as CSV: {error}", hint="is it cut off?") from None
    if not articles:
        raise DataError(f"{path} holds no article")
    return News(tuple(articles), np.array(topics, np.int64))


def by_topic(
    news: News,
    *,
    devices: int = 20,
    samples: int | None = None,
    seed: int,
    words: int = NEWS_WINDOW,
    vocabulary_size: int = NEWS_VOCABULARY,
    shares: Shares = CFL_SHARES,
) -> tuple[Population, Vocabulary]:
    """Deal articles of one topic to each device, for predicting the next word (CFL, section VI-C).

    A device's articles are cut by ``shares``, joined with an end token between them, and cut into windows; every window
    predicts the word after each of its words, so no padding is needed. Groups are the topics, in random order of devices.

    Args:
        news: articles.
        devices: m.
        samples: articles per device; None deals as many as the rarest topic allows.
        seed: seed of all random choices.
        words: tokens per window.
        vocabulary_size: size of the vocabulary, which is taken from the training articles.
        shares: fractions for training, validation and test.

    Returns:
        Shards with x and y of shape (windows, words), int64, y one word ahead; and the vocabulary.

    Raises:
        UsageError: there are too few articles.
    """
    rng = np.random.default_rng(seed)
    topics = np.unique(news.topics)
    if devices < len(topics):
        raise UsageError(f"{devices} devices can't hold {len(topics)} topics")
    truth = rng.permutation(np.arange(devices) % len(topics))
    # Each topic's articles in random order; devices take consecutive slices, so no article is used twice.
    rows = {int(g): rng.permutation(np.flatnonzero(news.topics == t)) for g, t in enumerate(topics)}
    holders = {g: int((truth == g).sum()) for g in rows}
    each = min(len(rows[g]) // holders[g] for g in rows) if samples is None else samples
    if each < 3 or any(each * holders[g] > len(rows[g]) for g in rows):
        raise UsageError(
            f"{each} articles a device: there are {min(map(len, rows.values()))} of the rarest topic",
            hint="take fewer --devices or --samples; a device needs three at least",
        )
    first, second = max(1, int(shares.train * each + 1e-9)), int((shares.train + shares.validation) * each + 1e-9)
    mine: list[tuple[list[int], list[int], list[int]]] = []
    taken = dict.fromkeys(rows, 0)
    for g in truth:
        got = [int(r) for r in rows[int(g)][taken[int(g)] : taken[int(g)] + each]]
        taken[int(g)] += each
        mine.append((got[:first], got[first:second], got[second:]))
    # From training articles only, so that the test articles stay unseen.
    vocabulary = Vocabulary.of((news.articles[r] for train, _, _ in mine for r in train), vocabulary_size)
    cuts = [tuple(_windows(news, part, vocabulary, words) for part in parts) for parts in mine]
    train, validation, test = ([c[i] for c in cuts] for i in range(3))
    if not all(map(len, train)):
        raise UsageError(f"a device's articles fill no window of {words} words", hint="take more --samples")
    return Population(tuple(train), tuple(validation), tuple(test), tuple(int(g) for g in truth)), vocabulary


def _windows(news: News, rows: Sequence[int], vocabulary: Vocabulary, words: int) -> Shard:
    stream: list[int] = []
    for row in rows:
        stream += [*vocabulary.tokens(news.articles[row]), END]
    count = max(0, len(stream) - 1) // words
    tokens = np.array(stream[: count * words + 1], np.int64)
    return Shard(tokens[:-1].reshape(count, words), tokens[1:].reshape(count, words))


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
