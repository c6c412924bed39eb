"""LEAF's JSON: FEMNIST by writer and Sent140 by account, in files as LEAF writes them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from shoal_lab.experiments.data.text import by_writer, load_femnist, load_sent140

from shoal.errors import DataError, UsageError
from tests.helpers.datafiles import leaf

PIXELS = 784


def images(count, value):
    """Return ``count`` images as lists of numbers."""
    return [[value] * PIXELS for _ in range(count)]


def tweet(text, account="a"):
    """Return a sample in LEAF's format: id, date, query, account, text."""
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", account, text]


@pytest.fixture
def femnist(tmp_path):
    """Three writers; the third has no test samples."""
    train = {
        "f0001": (images(9, 0.25), [3] * 9),
        "f0002": (images(4, 0.5), [61] * 4),
        "f0003": (images(20, 1.0), [7] * 20),
    }
    leaf(tmp_path / "femnist", "train", train)
    leaf(tmp_path / "femnist", "test", {"f0001": (images(1, 0.25), [3]), "f0002": (images(1, 0.5), [61])})
    return tmp_path


def test_writers_keep_leafs_division(femnist):
    people = load_femnist(femnist)
    assert [p.name for p in people] == ["f0001", "f0002", "f0003"]
    assert [(len(p.train), len(p.test)) for p in people] == [(9, 1), (4, 1), (20, 0)]
    assert people[1].train.x.shape == (4, PIXELS)
    assert (people[1].train.x.dtype, people[1].train.y.dtype) == (np.float32, np.int64)
    assert float(people[1].train.x[0, 0]) == 0.5
    assert people[1].test.y.tolist() == [61]


def test_a_writer_is_a_device(femnist):
    """Writers with too few samples are left out; one without test samples is cut 90/10."""
    population = by_writer(load_femnist(femnist), seed=0, least=10)
    assert [(len(a), len(b)) for a, b in zip(population.train, population.test, strict=True)] == [(9, 1), (18, 2)]
    assert population.groups is None
    assert len(by_writer(load_femnist(femnist), seed=0, least=1, devices=2)) == 2
    with pytest.raises(UsageError, match="there are 2"):
        by_writer(load_femnist(femnist), seed=0, least=10, devices=3)


@pytest.fixture
def sent140(tmp_path):
    """Two accounts."""
    loud = [tweet("GOOD good morning!"), tweet("bad bad bad day")]
    leaf(tmp_path / "sent140" / "data", "train", {"ann": (loud, ["4", "0"]), "bob": ([tweet("good night")], [1])})
    leaf(tmp_path / "sent140" / "data", "test", {"ann": ([tweet("good unseen words")], ["4"])})
    return tmp_path


def test_tweets_become_padded_tokens(sent140):
    people, vocabulary = load_sent140(sent140, words=5)
    ann = people[0]
    good, bad, morning = (vocabulary.ids[w] for w in ("good", "bad", "morning"))
    assert ann.train.x.tolist() == [
        [0, good, good, morning, vocabulary.ids["!"]],
        [0, bad, bad, bad, vocabulary.ids["day"]],
    ]
    assert ann.train.y.tolist() == [1, 0]
    assert ann.test.x.tolist() == [[0, 0, good, 1, 1]]
    assert ann.train.x.dtype == np.int64
    assert len(people[1].test) == 0


def test_the_most_frequent_words_are_kept(sent140):
    _, vocabulary = load_sent140(sent140, vocabulary_size=5)
    assert set(vocabulary.ids) == {"bad", "good"}
    assert len(vocabulary) == 5


def break_file(path, change):
    """Apply ``change`` to a JSON file's document."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d["num_samples"].__setitem__(0, 8), "9 samples and 9 labels, not the 8 promised"),
        (lambda d: d["num_samples"].pop(), "is shorter"),
        (lambda d: d["user_data"].pop("f0002"), "user 'f0002' .*KeyError"),
        (lambda d: d.pop("users"), "KeyError: 'users'"),
        (lambda d: d["user_data"]["f0001"]["x"][3].pop(), "user 'f0001' .*inhomogeneous"),
        (lambda d: d["user_data"]["f0001"]["y"].__setitem__(0, 62), "out of range"),
        (lambda d: d["user_data"]["f0001"]["x"][0].__setitem__(0, "dark"), "user 'f0001' .*'dark'"),
        (lambda d: d["user_data"]["f0001"]["x"][0].__setitem__(0, float("nan")), "out of range"),
    ],
)
def test_damaged_files_are_refused(femnist, change, complaint):
    break_file(next((femnist / "femnist/train").glob("*.json")), change)
    with pytest.raises(DataError, match=complaint):
        load_femnist(femnist)


def test_a_cut_file_is_refused(femnist):
    """And a writer in two files."""
    path = next((femnist / "femnist/train").glob("*.json"))
    more = path.with_name("more.json")
    more.write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="another file has this user, too"):
        load_femnist(femnist)
    more.unlink()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="can't be read as LEAF's JSON"):
        load_femnist(femnist)
    path.write_text("[1]")
    with pytest.raises(DataError, match="LEAF's JSON: TypeError"):
        load_femnist(femnist)


@pytest.mark.parametrize(
    ("x", "y", "complaint"),
    [([tweet("so so")], ["2"], "'ann' .*KeyError: '2'"), ([["id", "text"]], ["4"], "'ann' .*IndexError")],
)
def test_damaged_tweets_are_refused(tmp_path, x, y, complaint):
    for part in ("train", "test"):
        leaf(tmp_path / "sent140", part, {"ann": (x, y)})
    with pytest.raises(DataError, match=complaint):
        load_sent140(tmp_path)
