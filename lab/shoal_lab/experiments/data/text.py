"""Text as tokens: words, a vocabulary of the most frequent ones, and AG-News as next-word prediction."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.shares import CFL_SHARES, Shares
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
