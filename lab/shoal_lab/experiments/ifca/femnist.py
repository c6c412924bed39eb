"""ifca-femnist: handwriting by writer, all layers shared but the last, which is clustered (Ghosh et al., section 6.3).

LEAF's FEMNIST, one writer per device; two convolutions with pooling and two dense layers. IFCA runs on the last layer's
coordinates only, the segment ``cluster``; all others are the segment ``shared``, which is averaged over all participants
(section 4.3). Parameters that the paper does not state follow the authors' code: filters of 5x5, 2048 hidden units, six
writers a round, one epoch of batches of ten, step size 0.004, means weighted by samples. That code first trains a whole
model by FedAvg for 2000 rounds and then the last layer for 4000; here both are trained together for all 6000. One-shot
clustering compares whole models, since it has no shared segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from shoal.errors import UsageError
from shoal.task.manifest import LocalTraining
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

ROUNDS: Final = 6000
WRITERS: Final = 6
PUBLISHED: Final[Mapping[str, Any]] = {
    "ifca": {"2": 87.99, "3": 87.89},
    "one-shot": {"2": 87.41, "3": 87.38},
    "global": 84.45,
    "local": 75.85,
}
KNOBS: Final = ("k", "writers", "filters", "dense", "evaluate_every", "trainer", "lr", "epochs_alone", "restarts")


def femnist(options: Options, progress: Progress) -> Result:
    """Run ``ifca-femnist``."""
    from shoal.simulation.trainers.networks import Cnn
    from shoal_lab.experiments.data import leaf
    from shoal_lab.experiments.ifca.images import counts
    from shoal_lab.experiments.ifca.runs import Setup, run_setup

    if options.samples is not None:
        raise UsageError("a writer has the samples that he wrote", hint="leave --samples out")
    algorithm = options.algorithm or "ifca"
    k, rounds = options.knob("k", 2), options.rounds or ROUNDS
    progress.stage("reading femnist")
    people = leaf.load_femnist(options.data_dir)
    population = leaf.by_writer(people, devices=options.devices, seed=options.seed)
    network = Cnn(
        side=math.isqrt(leaf.FEMNIST_PIXELS),
        classes=leaf.FEMNIST_CLASSES,
        filters=counts(options.knob("filters", "32,64")),
        dense=counts(options.knob("dense", "2048")),
        same=True,
    )
    last = sum(math.prod(shape) for shape in network.shapes[-2:])
    participation = min(1.0, options.knob("writers", WRITERS) / len(population))
    lr = options.knob("lr", 0.004)
    published = PUBLISHED[algorithm]
    setup = Setup(
        experiment="ifca-femnist",
        population=population,
        network=network,
        local=LocalTraining(epochs=1, batch_size=10, lr=lr),
        pretrain=LocalTraining(epochs=options.knob("epochs_alone", 100), batch_size=10, lr=lr),
        rounds=rounds,
        k=k,
        published=published.get(str(k)) if isinstance(published, Mapping) else published,
        restarts=options.knob("restarts", 1),
        participation=participation,
        weighting="samples",
        evaluate_every=options.knob("evaluate_every", 100),
        alone_rounds=max(1, round(rounds * participation)),
        segments=(("shared", network.length - last), ("cluster", last)),
        defaults={"normalise": "samples"},
        parameters={"k": k, "clustered_coordinates": last},
    )
    return run_setup(setup, options, progress, KNOBS)


EXPERIMENTS: Final = (
    Study(
        id="ifca-femnist",
        paper="ifca, section 6.3, Table 2",
        title="handwriting by writer, the last layer clustered",
        algorithms=("ifca", "one-shot", "global", "local"),
        published=PUBLISHED,
        runner=femnist,
        needs=("femnist",),
    ),
)
