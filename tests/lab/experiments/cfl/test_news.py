"""cfl-news on a tiny corpus in AG-News's format."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from shoal_lab.experiments.cfl import news as cfl_news
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError

from shoal.errors import UsageError
from shoal.report.plot import panels_of

TOPIC_WORDS = (
    ("senate", "treaty", "minister", "vote"),
    ("match", "coach", "goal", "season"),
    ("shares", "profit", "market", "bank"),
    ("chip", "software", "orbit", "laser"),
)


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each topic repeats its own words in its own order."""
    folder = tmp_path_factory.mktemp("ag-news")
    rng = np.random.default_rng(5)
    for part, count in (("train", 240), ("test", 8)):
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            for i in range(count):
                words = TOPIC_WORDS[i % 4]
                first = int(rng.integers(4))
                text = " ".join(words[(first + j) % 4] for j in range(14))
                writer.writerow([i % 4 + 1, f"{words[0]} news", text])
    return folder


def test_news_gives_perplexities_and_clusters(news: Path) -> None:
    """A short run: perplexity falls from that of guessing among all words, and no group is ever cut."""
    settings = {"width": "12", "vocabulary": "40", "words": "8", "batch_size": "10", "lr": "2.0", "epochs": "1"}
    options = Options(devices=8, samples=24, rounds=10, mask="permutation", data_dir=news, settings=settings)
    data = cfl_news.run(options, Quiet()).data()
    assert data["history"][0]["perplexity"] > data["perplexity"] > 1
    assert data["perplexity"] == pytest.approx(data["history"][-1]["perplexity"])
    assert data["perplexity"] < 12
    assert data["published"]["perplexity"] == 36
    assert data["parameters"]["topics"] == 4
    assert data["wrong_splits"] == data["pure_clusters_split"] == 0
    assert panels_of([data], "perplexity")


def test_absent_news_is_exit_code_8(tmp_path: Path) -> None:
    """The message names the file and where it goes."""
    with pytest.raises(MissingDataError, match=r"train\.csv") as missing:
        cfl_news.run(Options(data_dir=tmp_path), Quiet())
    assert missing.value.exit_code == 8


def test_fedavg_takes_no_settings_of_cfl(news: Path) -> None:
    """Settings go to the strategy that has them."""
    with pytest.raises(UsageError, match="no setting 'eps1'"):
        cfl_news.run(Options(algorithm="fedavg", data_dir=news, settings={"eps1": "1"}), Quiet())
