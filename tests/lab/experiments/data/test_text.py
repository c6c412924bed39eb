"""Words, vocabularies, and AG-News dealt by topic for predicting the next word."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.data.text import END, News, Vocabulary, by_topic, load_news, words_of

from shoal.errors import DataError, UsageError


def test_words_are_lower_case():
    assert words_of("Fed's rate: 3.5%\n<b>OK</b>") == [
        "fed's",
        "rate",
        ":",
        "3",
        ".",
        "5",
        "%",
        "<",
        "b",
        ">",
        "ok",
        "<",
        "/",
        "b",
        ">",
    ]


def test_a_vocabulary_ranks_by_frequency():
    vocabulary = Vocabulary.of([["b", "a"], ["c", "b"]], 6)
    assert vocabulary.ids == {"b": 3, "a": 4, "c": 5}
    assert vocabulary.tokens(["c", "zebra"]) == [5, 1]
    assert Vocabulary.of([["b", "a"], ["c", "b"]], 4).ids == {"b": 3}
    with pytest.raises(UsageError, match="3 tokens holds no word"):
        Vocabulary.of([["a"]], 3)


def test_texts_are_cut_or_padded():
    vocabulary = Vocabulary.of([["a", "b", "c"]], 9)
    assert vocabulary.padded([["a", "b", "c"], [], ["c"]], 2).tolist() == [[3, 4], [0, 0], [0, 5]]


def write(path, rows):
    """Write rows as AG-News does: every cell in quotes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(",".join(f'"{c}"' for c in row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def corpus(tmp_path):
    """Forty articles of each of the four topics, with words of their own."""
    rows = [(t + 1, f"title {t}", f"topic{t} says word{i} and topic{t} says so") for i in range(40) for t in range(4)]
    write(tmp_path / "ag-news/train.csv", rows)
    write(tmp_path / "ag-news/test.csv", rows[:8])
    return tmp_path


def test_articles_and_topics_are_read(corpus):
    news = load_news(corpus)
    assert (len(news.articles), news.topics[:5].tolist()) == (160, [0, 1, 2, 3, 0])
    assert news.articles[1][:4] == ("title", "1", "topic1", "says")
    assert len(load_news(corpus, part="test").articles) == 8


def test_every_device_holds_one_topic(corpus):
    """CFL's experiment: twenty devices, four topics, five devices each, no article twice."""
    news = load_news(corpus)
    population, vocabulary = by_topic(news, devices=20, seed=1, words=6)
    assert [population.groups.count(g) for g in range(4)] == [5] * 4
    for device, group in enumerate(population.groups):
        for shard in (population.train[device], population.validation[device], population.test[device]):
            mine, others = (
                vocabulary.ids[f"topic{group}"],
                {vocabulary.ids[f"topic{t}"] for t in range(4) if t != group},
            )
            assert mine in shard.x
            assert not others & set(shard.x.ravel().tolist())


def test_a_window_predicts_the_next_word(corpus):
    """Labels are the words one ahead, also across windows; articles end with a mark."""
    population, _ = by_topic(load_news(corpus), devices=4, seed=0, words=5)
    shard = population.train[0]
    assert shard.x.shape == shard.y.shape
    assert (shard.x.dtype, shard.x.shape[1]) == (np.int64, 5)
    assert np.array_equal(shard.x.ravel()[1:], shard.y.ravel()[:-1])
    assert END in shard.y


def test_the_vocabulary_is_of_training():
    """A word that only validation or test articles have stays unknown."""
    articles = tuple((f"w{i}",) for i in range(10))
    population, vocabulary = by_topic(News(articles, np.zeros(10, np.int64)), devices=1, seed=0, words=2)
    assert len(vocabulary.ids) == 6
    assert set(population.test[0].x.ravel().tolist()) <= {1, END}


def test_the_seed_decides_everything(corpus):
    news = load_news(corpus)
    one, again, other = (by_topic(news, devices=8, seed=s)[0] for s in (1, 1, 2))
    assert one.groups == again.groups
    assert all(np.array_equal(a.x, b.x) for a, b in zip(one.train, again.train, strict=True))
    assert one.groups != other.groups or not np.array_equal(one.train[0].x, other.train[0].x)


def test_too_few_articles_are_refused(corpus):
    news = load_news(corpus)
    with pytest.raises(UsageError, match="9 articles a device: there are 40"):
        by_topic(news, devices=20, samples=9, seed=0)
    with pytest.raises(UsageError, match="can't hold 4 topics"):
        by_topic(news, devices=3, seed=0)
    with pytest.raises(UsageError, match="fill no window of 900 words"):
        by_topic(news, devices=20, seed=0, words=900)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('"1","a","b"\n"5","a","b"\n', "line 2: class '5' is not 1 to 4"),
        ('"1","a","b"\n"2"\n', "line 2: not class, title, description"),
        ('"1","a","b"\n"2","cut o', "can't be read as CSV"),
        ("", "holds no article"),
    ],
)
def test_damaged_files_are_refused(corpus, text, complaint):
    (corpus / "ag-news/train.csv").write_text(text)
    with pytest.raises(DataError, match=complaint):
        load_news(corpus)
