"""Images from the Gram matrix of a round's updates, which every mask shows, learned on a shadow fleet of public images.

The attacker imitates the round with its own random models, describes each update by its norm and its cosines with the others,
and shows the mean of the images whose descriptions are nearest. Shadow training is that of Shokri et al. (2017).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.structure.network import Network, Rows

SHADOWS: Final = 1500
"""Shadow updates to learn from, about."""
NEIGHBOURS: Final = 60
QUANTILES: Final = np.linspace(0, 1, 12)


def describe(updates: Rows) -> NDArray[np.float64]:
    """Return features of each update, (n, features), from the dot products of updates (n, d) alone."""
    gram = (updates @ updates.T).astype(np.float64)
    norms = np.sqrt(np.maximum(np.diag(gram), 1e-30))
    cosines = gram / norms[:, None] / norms[None]
    np.fill_diagonal(cosines, 0)
    size = np.log(norms) - np.median(np.log(norms))
    features = (size[:, None], np.quantile(cosines, QUANTILES, axis=1).T, (cosines**2).mean(1)[:, None])
    return np.concatenate(features, axis=1)


def shadows(lab: Lab, network: Network, n: int, spread: float) -> tuple[NDArray[np.float64], Rows]:
    """Return features (m, features) and images (m, pixels) of shadow fleets of n devices.

    Their models are random: a mask that mixes coordinates turns whatever is announced into noise of the same norm.
    """

    def trained() -> tuple[NDArray[np.float64], Rows]:
        rng, features, images = lab.rng(f"shadow fleets {n}"), [], []
        for _ in range(max(1, SHADOWS // n)):
            own = lab.public.rows(rng.integers(0, len(lab.public), n))
            model = network.origin(rng) + rng.normal(0, spread, network.length).astype(np.float32)
            features.append(describe(network.updates(model, own.x[:, None], own.y[:, None])))
            images.append(own.x)
        return np.concatenate(features), np.concatenate(images)

    return lab.once(f"shadow fleets {n} {spread} {network.length}", trained)


def guess(lab: Lab, network: Network, updates: Rows, spread: float) -> NDArray[np.float64]:
    """Return a guess of the image of each one-image update, (n, pixels).

    Args:
        lab: holds the public images.
        network: the model's sizes.
        updates: one round's masked updates, (n, d).
        spread: standard deviation of the means that the attacker announced.
    """
    known, shown = shadows(lab, network, len(updates), spread)
    scale = known.std(0) + 1e-9
    seen, known = describe(updates) / scale, known / scale
    apart = (seen**2).sum(1)[:, None] - 2 * seen @ known.T + (known**2).sum(1)[None]
    nearest = np.argpartition(apart, min(NEIGHBOURS, len(known) - 1), axis=1)[:, :NEIGHBOURS]
    return np.asarray(shown[nearest].mean(1), np.float64)
