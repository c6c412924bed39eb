"""Small files of every data set, in the true formats."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from tests.helpers.mnist import write_bars

WORDS = (
    ("senate", "treaty", "minister", "vote"),
    ("match", "coach", "goal", "season"),
    ("shares", "profit", "market", "bank"),
    ("chip", "software", "orbit", "laser"),
)


def write_leaf(folder, part, users):
    (folder / part).mkdir(parents=True, exist_ok=True)
    document = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    (folder / part / "all_data_0.json").write_text(json.dumps(document))


def write_cifar(folder, rng):
    folder.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        labels, images = rng.integers(0, 10, (40, 1), np.uint8), rng.integers(0, 256, (40, 3072), np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, images], 1).tobytes())


def write_people(root, rng):
    """Eight writers of three letters and one digit, and six accounts that love or hate this."""
    for part, letters, tweets in (("train", 16, 9), ("test", 6, 4)):
        writers, accounts = {}, {}
        for i in range(8):
            y = np.array([5, 36, 40, 61])[rng.integers(0, 4, letters)]
            y[0] = 36
            x = rng.uniform(0, 0.3, (letters, 784))
            for row, label in zip(x, y, strict=True):
                row[12 * label : 12 * label + 40] += 0.6
            writers[f"f{i:04d}_00"] = {"x": x.round(3).tolist(), "y": y.tolist()}
        for i in range(6):
            y = rng.choice(["0", "4"], tweets).tolist()
            texts = [f"i {'love' if label == '4' else 'hate'} this {j}" for j, label in enumerate(y)]
            accounts[f"a{i}"] = {"x": [["id", "date", "q", f"a{i}", text] for text in texts], "y": y}
        write_leaf(root / "femnist", part, writers)
        write_leaf(root / "sent140", part, accounts)


def write_news(folder, rng):
    """Each topic repeats its own words in its own order."""
    folder.mkdir()
    for part, count in (("train", 240), ("test", 8)):
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            for i in range(count):
                words, first = WORDS[i % 4], int(rng.integers(4))
                text = " ".join(words[(first + j) % 4] for j in range(14))
                writer.writerow([i % 4 + 1, f"{words[0]} news", text])


@pytest.fixture(scope="session")
def data_sets(tmp_path_factory):
    """Return a folder with a folder for each data set of images, people and news."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    (root / "mnist").mkdir()
    write_bars(root / "mnist", seed=1, train=1000, test=200)
    write_cifar(root / "cifar10", rng)
    write_people(root, rng)
    write_news(root / "ag-news", rng)
    return root
