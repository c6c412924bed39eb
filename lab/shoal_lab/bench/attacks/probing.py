"""An aggregator that broadcasts forged means, and learns from the devices' uploads which tensor it changed.

Under a permutation, a spike in one masked coordinate changes one clear coordinate; devices train on it and report loss and norm.
Malicious models in Boenisch et al., "When the Curious Abandon Honesty" (2023); here the attacker does not know the positions of
the weights and probes for them. Also, a mean of one update is that update: it shows it to every device, if the aggregator
claims a larger count.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.update import LOSS_DECIMALS
from shoal.types import Float32Vector
from shoal_lab.bench.attacks.base import Attack, Result, balanced_accuracy, share_recovered
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Images, Lab
from shoal_lab.bench.attacks.protocol import device_model

WHO: Final = "aggregator that departs from the protocol, with data of the same kind and the clear initial model"
WHO_COUNT: Final = "aggregator that lies about how many devices a mean is of, and a curious device that reads it"
SPIKE: Final = 20.0
"""How far one coordinate is moved: far below the norm limit."""
PER_LAYER: Final = 40
SAMPLES: Final = 40


def answer(lab: Lab, theta: Float32Vector, images: Images) -> tuple[Float32Vector, float]:
    """Train a device from ``theta`` (d,) and return its clear update and its reported, rounded loss."""
    delta, loss = lab.report(images, ONE_EPOCH, theta=theta)
    return delta, round(loss, LOSS_DECIMALS)


def signs(delta: NDArray[np.float32], loss: float, at: int) -> list[float]:
    """Return features of an upload, masked or not, that depend on the changed coordinate but not on its position."""
    size = np.abs(delta).astype(np.float64)
    norm = float(np.sqrt((size**2).sum())) + 1e-12
    # The small terms keep the logarithms of zeros finite.
    return [loss, np.log(norm), np.log(size.max() + 1e-12), float((delta == 0).mean()), np.log(size[at] / norm + 1e-9)]


def _spike(lab: Lab, at: int) -> Float32Vector:
    offset = np.zeros(lab.length, np.float32)
    offset[at] = SPIKE
    return offset


def _places(truth: NDArray[np.int64], rng: np.random.Generator, most: int) -> NDArray[np.int64]:
    which = [np.flatnonzero(truth == c) for c in np.unique(truth)]
    return np.concatenate([rng.choice(w, min(most, len(w)), replace=False) for w in which])


def learned(lab: Lab) -> Any:
    """Return a classifier of answers by tensor, from spikes at known places in the attacker's own copy."""
    from sklearn.ensemble import RandomForestClassifier

    def fit() -> Any:
        at = _places(lab.layers, lab.rng("probing, own"), 2 * PER_LAYER)
        own = lab.pick("probing, own", SAMPLES, lab.public)
        rows = [signs(*answer(lab, lab.origin + _spike(lab, int(i)), own), int(i)) for i in at]
        forest = RandomForestClassifier(60, class_weight="balanced", random_state=0, n_jobs=1)
        return forest.fit(np.array(rows), lab.layers[at])

    return lab.once("probing learned", fit)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the accuracy of naming the tensor of a masked coordinate by one probe each, and the gain from a false count."""
    truth = lab.layer_of(mode)
    at = _places(truth, lab.rng("probing"), lab.trials(PER_LAYER, PER_LAYER // 2))
    theirs = lab.pick("probing", SAMPLES)
    rows = []
    for i in at:
        delta, loss = answer(lab, device_model(lab, mode, _spike(lab, int(i))), theirs)
        rows.append(signs(lab.masked(delta, mode), loss, int(i)))
    guess = learned(lab).predict(np.array(rows))
    return [
        Result(
            name="probing: layer of a coordinate",
            attacker=WHO,
            success=balanced_accuracy(guess, truth[at]),
            chance=1 / len(np.unique(truth)),
            unit="accuracy",
            margin=0.1,
            note="one crafted mean a coordinate",
        ),
        _false_count(lab, mode),
    ]


def _false_count(lab: Lab, mode: str) -> Result:
    victim = lab.update(lab.pick("false count", 80), ONE_EPOCH)
    others = [lab.update(lab.pick(f"false count {i}", 80), ONE_EPOCH, seed=i) for i in (1, 2)]
    sent = lab.masked(victim, mode)
    honest = np.stack([sent, *(lab.masked(u, mode) for u in others)]).mean(0)
    read = [device_model(lab, mode, offset) - lab.origin for offset in (sent, honest)]
    return Result(
        name="false count: a device reads another's update",
        attacker=WHO_COUNT,
        success=share_recovered(read[0], victim),
        chance=share_recovered(read[1], victim),
        unit="share",
        margin=0.1,
        note="sent as a mean of three, which the device's checks accept; chance is from a true mean of three",
    )


ATTACK: Final = Attack("active aggregator", "Boenisch et al. 2023 (malicious models)", WHO, run)
