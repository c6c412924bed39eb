"""fedgroup-synthetic: Synthetic(1,1), in which every device has a labelling of its own (Duan et al., section IV).

100 devices, five groups, 20 devices a round, 20 epochs of batches of ten at step size .01. The group cold start takes all 100
devices, so none is left for RAC. Sizes are lognormal(4, 2), and their sum depends mostly on the largest device: another seed
is another problem, and the paper's 75,349 samples are one draw. The paper gives no number of rounds; FedProx's 200 are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.errors import UsageError
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

DEVICES: Final = 100
GROUPS: Final = 5
LR: Final = 0.01
ROUNDS: Final = 200
PUBLISHED: Final[Mapping[str, float]] = {
    "fg-edc": 88.4,
    "fg-madc": 92.1,
    "fgp-edc": 87.4,
    "fgp-madc": 88.5,
    "ifca": 95.5,
    "fesem": 92.1,
    "fedprox": 81.5,
    "fedavg": 74.7,
    "rcc": 92.9,
}


def synthetic(options: Options, progress: Progress) -> Result:
    """Run ``fedgroup-synthetic``."""
    from shoal.simulation.trainers.networks import Softmax
    from shoal_lab.experiments.data import generators
    from shoal_lab.experiments.fedgroup.runs import Setup, method_of, run_setup

    if options.samples is not None:
        raise UsageError("sizes are drawn", hint="leave --samples out")
    alpha, beta = options.knob("shape_alpha", 1.0), options.knob("shape_beta", 1.0)
    progress.stage(f"making Synthetic({alpha:g},{beta:g})")
    devices = options.devices or DEVICES
    setup = Setup(
        experiment="fedgroup-synthetic",
        population=generators.synthetic(alpha, beta, devices=devices, seed=options.seed),
        network=Softmax(generators.SYNTHETIC_INPUTS, generators.SYNTHETIC_CLASSES),
        groups=GROUPS,
        lr=LR,
        published=PUBLISHED.get(method_of(options)[0]),
        rounds=options.rounds or ROUNDS,
        parameters={"shape_alpha": alpha, "shape_beta": beta},
    )
    return run_setup(setup, options, progress, ("shape_alpha", "shape_beta"))


EXPERIMENTS: Final = (
    Study(
        id="fedgroup-synthetic",
        paper="fedgroup, section IV, Table III and Fig. 4",
        title="Synthetic(1,1), multinomial logistic regression",
        algorithms=tuple(PUBLISHED),
        published=PUBLISHED,
        runner=synthetic,
    ),
)
