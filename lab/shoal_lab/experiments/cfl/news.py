"""cfl-news: the next word of AG-News, four topics (Sattler et al., section VI-C, Fig. 9).

Every device holds articles of one topic, cut 60/20/20, and trains an LSTM of two layers. Reported is the perplexity on the
devices' test articles, exp of the mean loss per word. The paper names neither vocabulary, widths nor step size; ours are the
parameters below. They are not tuned, because the corpus was not available.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from shoal.errors import UsageError
from shoal.task.manifest import LocalTraining
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

DEVICES: Final = 20
ROUNDS: Final = 100
EPOCHS: Final = 3
BATCH: Final = 100
LR: Final = 1.0
CLIP: Final = 1.0
WIDTH: Final = 128
LAYERS: Final = 2
KNOBS: Final = ("lr", "clip", "epochs", "batch_size", "vocabulary", "words", "width", "evaluate_every")
PUBLISHED: Final[Mapping[str, Any]] = {
    "cfl": {"perplexity": 36.0, "splits": "in rounds 30, 60 and 90"},
    "fedavg": {"perplexity": 42.0},
}


def run(options: Options, progress: Progress) -> Result:
    """Run ``cfl-news``."""
    from shoal.simulation.trainers.networks import Lstm
    from shoal_lab.experiments.cfl.watch import MOST_NATS
    from shoal_lab.experiments.cfl.watched import watched, watched_result
    from shoal_lab.experiments.data import text

    algorithm = options.algorithm or "cfl"
    settings = options.strategy_settings(*KNOBS)
    if algorithm != "cfl" and settings:
        raise UsageError(f"{algorithm} has no setting {sorted(settings)[0]!r}")
    m, rounds = options.devices or DEVICES, options.rounds or ROUNDS
    words = options.knob("words", text.NEWS_WINDOW)
    progress.stage("reading ag-news")
    news = text.load_news(options.data_dir)
    population, vocabulary = text.by_topic(
        news,
        devices=m,
        samples=options.samples,
        seed=options.seed,
        words=words,
        vocabulary_size=options.knob("vocabulary", text.NEWS_VOCABULARY),
    )
    width = options.knob("width", WIDTH)
    network = Lstm(len(vocabulary), width, width, LAYERS)
    local = LocalTraining(
        epochs=options.knob("epochs", EPOCHS),
        batch_size=options.knob("batch_size", BATCH),
        lr=options.knob("lr", LR),
        clip=options.knob("clip", CLIP),
    )
    every = options.knob("evaluate_every", 1)
    watch, done = watched(algorithm, settings, population, network, local, rounds, every, options, progress)
    return watched_result(
        "cfl-news",
        algorithm,
        PUBLISHED[algorithm],
        watch,
        done,
        {
            "devices": m,
            "topics": len(set(population.groups or ())),
            "windows": int(population.samples.min()),
            "words": words,
            "vocabulary": len(vocabulary),
            "network": repr(network),
            "coordinates": network.length,
            "rounds": rounds,
            "epochs": local.epochs,
            "batch_size": local.batch_size,
            "lr": local.lr,
            "clip": local.clip,
            "seed": options.seed,
            "mask": options.mask,
            "settings": settings,
        },
        {"perplexity": None if done.final is None else math.exp(min(done.final.loss, MOST_NATS))},
    )


EXPERIMENTS: Final = (
    Study(
        id="cfl-news",
        paper="cfl, section VI-C, Fig. 9",
        title="the next word of AG-News, four topics",
        algorithms=("cfl", "fedavg"),
        published=PUBLISHED,
        runner=run,
        needs=("ag-news",),
        figure="perplexity",
    ),
)
