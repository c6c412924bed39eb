"""Devices that train from the means that an aggregator announces, as that aggregator sees them: masked uploads alone.

`Network` computes the gradients of a network with one hidden layer for many devices at once. One step on a small batch equals
`edge_client.learning.training` to float32 rounding; a test compares them.

Then groups of coordinates or components that belong to one hidden unit, from masked updates; and the score of such groups. For
masks that mix coordinates there is independent component analysis, which uses the Gram matrix of the updates alone, so that it
works equally under every orthogonal mask. Hyvarinen and Oja, "Independent Component Analysis: Algorithms and Applications"
(2000), with symmetric decorrelation, tanh.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_client.run.policy import MEAN_RATIO, mean_limit
from shoal.protocol.documents import RunPlan, SegmentSpec
from shoal_lab.bench.attacks.lab import CLASSES, LR, FleetKeys, Lab, Lifetime, Rows, opened_mean, signed_plan

DEVICES: Final = (15, 100, 450)
"""Fleets whose updates of one round are at most a tenth of the coordinates of the model on digits."""
MANY: Final = (500, 2000)
"""Larger fleets, which are reported only."""
QUICK: Final = (15, 100)
ROUNDS: Final = 200
QUICK_ROUNDS: Final = 12
ANALYSED: Final = 600
"""Vectors of one fleet that are analysed round by round, about; at least eight rounds."""
LARGEST: Final = 20_000
"""Coordinates of the largest model that is attacked: some attacks compare all pairs of coordinates."""
POOLED: Final = 2000
QUICK_POOLED: Final = 900
"""Most vectors that are analysed together."""


def fleet_sizes(lab: Lab, *, many: bool = False) -> tuple[int, ...]:
    """Return the numbers of devices, none for a large model; with ``many`` also those above a tenth of the coordinates."""
    if lab.length > LARGEST:
        return ()
    if lab.quick:
        return QUICK
    return DEVICES + MANY if many else DEVICES


def analysed_rounds(lab: Lab, devices: int) -> list[int]:
    """Return the rounds, from 1, whose uploads are analysed, the last one included."""
    last = lab.trials(ROUNDS, QUICK_ROUNDS)
    count = lab.trials(max(8, ANALYSED // devices), 3)
    if devices > max(DEVICES):
        last, count = 2, 1
    return sorted({int(r) for r in np.linspace(last, 2, min(count, last - 1))})


def beyond(lab: Lab, devices: int) -> str:
    """Return a note for a fleet with more updates in a round than a tenth of the coordinates, else nothing."""
    return "more vectors under one key than a tenth of the coordinates" if devices > lab.length / 10 else ""


@dataclass(frozen=True, slots=True)
class Network:
    """An MLP with ReLU and cross entropy; vectors have the order of the built-in task: W1, b1, W2, b2.

    Attributes:
        pixels, hidden, classes: the sizes of its layers.
    """

    pixels: int
    hidden: int
    classes: int = CLASSES

    @classmethod
    def of(cls, lab: Lab, hidden: int = 0) -> Network:
        """Return the lab's network, or one with another number of hidden units."""
        return cls(lab.side**2, hidden or lab.hidden)

    @property
    def length(self) -> int:
        """Coordinates d of the model."""
        return self.hidden * (self.pixels + 1) + self.classes * (self.hidden + 1)

    @property
    def unit(self) -> NDArray[np.int64]:
        """The hidden unit of each coordinate, (d,), int64; ``hidden`` for the output biases, which have none."""
        h = self.hidden
        per_layer = (np.repeat(np.arange(h), self.pixels), np.arange(h), np.tile(np.arange(h), self.classes))
        return np.concatenate([*per_layer, np.full(self.classes, h)])

    def split(self, theta: Rows) -> tuple[Rows, Rows, Rows, Rows]:
        """Return W1 (hidden, pixels), b1 (hidden,), W2 (classes, hidden) and b2 (classes,) of a model (d,), as views."""
        at = np.cumsum([self.hidden * self.pixels, self.hidden, self.hidden * self.classes])
        w1, b1, w2, b2 = np.split(theta, at)
        return w1.reshape(self.hidden, self.pixels), b1, w2.reshape(self.classes, self.hidden), b2

    def origin(self, rng: np.random.Generator) -> Rows:
        """Return a random model (d,), float32, with the spread of torch's initialisation."""
        spread = np.full(self.length, self.hidden**-0.5)
        spread[: self.hidden * (self.pixels + 1)] = self.pixels**-0.5
        return np.asarray(rng.uniform(-1, 1, self.length) * spread, np.float32)

    def updates(self, theta: Rows, x: Rows, y: NDArray[np.int64], lr: float = LR) -> Rows:
        """Return the updates (n, d), float32, of one step of n devices from ``theta`` (d,).

        Args:
            theta: the model that all start from.
            x: images of each device, (n, batch, pixels), float32.
            y: their labels, (n, batch), int64.
            lr: step size.
        """
        w1, b1, w2, b2 = self.split(theta)
        n, batch = y.shape
        z = x @ w1.T + b1
        a = np.maximum(z, 0)
        q = a @ w2.T + b2
        q = np.exp(q - q.max(2, keepdims=True))
        q /= q.sum(2, keepdims=True)
        q[np.arange(n)[:, None], np.arange(batch)[None], y] -= 1
        q /= batch
        g = (q @ w2) * (z > 0)
        parts = (g.transpose(0, 2, 1) @ x, g.sum(1), q.transpose(0, 2, 1) @ a, q.sum(1))
        step = np.concatenate([part.reshape(n, -1) for part in parts], axis=1)
        step *= np.float32(-lr)
        # Devices send the difference of two float32 models, so an update carries the rounding of the sum.
        step += theta
        step -= theta
        return step


OWN_IMAGES: Final = 80
BELOW: Final = 0.999
"""Share of what devices accept that the attacker uses, because of rounding."""


class MaskedFleet:
    """A fleet of devices that take one step a round, each on ``batch`` of its images.

    Devices hold the model and add the announced mean to it, under the key of its round. Under one key a run the aggregator
    takes back each mean with the next one, since both are under one mask: its means are offsets from the origin there.

    Attributes:
        round: the open round, from 1.
        held: the model (d,) that devices hold; secret.
        clear: the clear updates (n, d) of the last call of `uploads`, for scoring.
        x, y: the images and labels that `uploads` trained on, (n, batch, pixels) and (n, batch), for scoring.
    """

    def __init__(
        self,
        lab: Lab,
        mode: str,
        lifetime: Lifetime,
        devices: int,
        *,
        batch: int = 1,
        network: Network | None = None,
        same_images: bool = False,
    ) -> None:
        """Start a run; with ``same_images`` a device trains on the same images in each round."""
        self.network = Network.of(lab) if network is None else network
        self.keys = FleetKeys(lab, mode, lifetime, self.network.length)
        self.devices, self.batch, self.round = devices, batch, 1
        self._lab, self._same = lab, same_images
        self._rng = lab.rng(f"structure fleet {devices} {batch}")
        self.origin = self.network.origin(lab.rng("structure origin"))
        self.held = self.origin.copy()
        # Small fleets get different images each; large ones share the private images between them.
        pool, need = len(lab.private), devices * OWN_IMAGES
        self._own = np.resize(self._rng.permutation(pool), need).reshape(OWN_IMAGES, devices).T
        self._offset = np.zeros(self.network.length, np.float32)
        self._longest = np.zeros(devices)
        self.clear = np.zeros((0, self.network.length), np.float32)
        self.x, self.y = lab.private.x[:0], lab.private.y[:0]

    def train(self) -> Rows:
        """Train on the round's images and return the clear updates (n, d)."""
        if self._same:
            picked = self._own[:, : self.batch]
        else:
            columns = self._rng.integers(0, OWN_IMAGES, (self.devices, self.batch))
            picked = np.take_along_axis(self._own, columns, axis=1)
        self.x, self.y = self._lab.private.x[picked], self._lab.private.y[picked]
        self.clear = self.network.updates(self.held, self.x, self.y)
        self._longest = np.maximum(self._longest, np.linalg.norm(self.clear, axis=1))
        return self.clear

    def uploads(self) -> Rows:
        """Train, and return the updates (n, d) masked under the open round's key."""
        return self.keys.masked(self.train(), self.round)

    def announce(self, mean: Rows) -> None:
        """Send devices a masked ``mean`` (d,) under the open round's key; they check it, use it, and the next round opens.

        The attacker keeps to what devices accept in one step. It shortens a longer mean, or under one key sends it in several
        rounds.

        Raises:
            UntrustedError: the devices' policy refuses it.
        """
        sent = mean if self.keys.lifetime == "round" else mean - self._offset
        norm = float(np.linalg.norm(sent.astype(np.float64)))
        limit, longest = self._plan().recipe.norm_limit, float(np.median(self._longest))
        most = max(MEAN_RATIO * longest, float(np.linalg.norm(self.held))) if longest else limit
        excess = max(1.0, norm / (BELOW * most)) if norm <= limit else 1.0
        steps = math.ceil(excess) if self.keys.lifetime == "run" else 1
        for _ in range(steps):
            self._step(sent / np.float32(max(excess, steps)))
        self._offset = mean

    def _plan(self) -> RunPlan:
        segments = (SegmentSpec("cluster", self.network.length),)
        return dataclasses.replace(signed_plan(self._lab, self.keys.mode), segments=segments)

    def _step(self, sent: Rows) -> None:
        plan, norm = self._plan(), float(np.linalg.norm(sent.astype(np.float64)))
        # The aggregator announces a limit that just allows the mean. The devices with the shortest updates may refuse it.
        limit = mean_limit(norm, float(np.median(self._longest)), float(np.linalg.norm(self.held)), plan)
        self.held = self.held + opened_mean(plan, self.keys.key(self.round), self.round, sent, limit)
        self.round += 1

    def energies(self, vectors: Rows, round_: int, keys: FleetKeys | None = None) -> NDArray[np.float64]:
        """Return the share of each masked vector's energy in each hidden unit, for scoring.

        Args:
            vectors: masked vectors (k, d), such as directions that an attack found.
            round_: the round whose key they are under.
            keys: other keys, for a null.

        Returns:
            shape (k, hidden), float64; each row adds up to at most 1.
        """
        power = (keys or self.keys).unmasked(vectors, round_).astype(np.float64) ** 2
        whole = power.sum(1, keepdims=True)
        members = self.network.unit[:, None] == np.arange(self.network.hidden)
        return np.asarray((power @ members) / np.maximum(whole, 1e-300), np.float64)


MIN_COPIES: Final = 8
"""Least coordinates with one zero pattern that count as a unit: its bias and its output weights, eleven for ten classes."""

STRAY: Final = 1e-3
"""Rate of moves outside a unit's pattern: small updates may round to zero in some coordinates of a unit alone."""


def silent_patterns(updates: Rows, most: int) -> NDArray[np.bool_]:
    """Return patterns of updates in which a hidden unit is active, (patterns, n), from masked one-image updates (n, d).

    A dead ReLU leaves all coordinates of its unit at zero, and its bias and output weights move together whenever it is
    alive. So their zero patterns are equal, and a permutation, with signs or without, keeps zero patterns.
    """
    moved = updates != 0
    packed = np.ascontiguousarray(np.packbits(moved, axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, copies = np.unique(keys, return_index=True, return_counts=True)
    active = moved[:, first].sum(0)
    likely = np.flatnonzero((copies >= MIN_COPIES) & (active > 0))
    # Patterns of rarely coloured pixels repeat across units too, but they are shorter than those of units.
    # Where several units are always alive, each pixel makes such a pattern too, so that there is room for more than units.
    chosen = likely[np.argsort(-active[likely], kind="stable")][: 3 * most + 1]
    return np.ascontiguousarray(moved[:, first[chosen]].T)


def by_silence(updates: Rows, patterns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the pattern that each masked coordinate belongs to, (d,), int64; -1 if it never moved or fits none.

    A coordinate of a unit moves only while the unit is alive, at a rate of its own; the likeliest pattern wins.
    """
    moved = (updates != 0).astype(np.float32)
    alive = patterns.astype(np.float32)
    count, active = moved.sum(0), np.maximum(alive.sum(1, keepdims=True), 1)
    inside = alive @ moved
    rate = np.clip(inside / active, 1e-6, 1 - 1e-6)
    likelihood = inside * np.log(rate) + (active - inside) * np.log1p(-rate) + (count - inside) * np.log(STRAY)
    labels = likelihood.argmax(0)
    fits = np.take_along_axis(inside, labels[None], 0)[0] >= 0.5 * count
    return np.asarray(np.where(fits & (count > 0), labels, -1), np.int64)


def by_activity(activity: NDArray[np.float64], groups: int) -> NDArray[np.int64]:
    """Return a group for each component, (k,), int64: those with similar sizes over the updates (n, k) are together."""
    from sklearn.cluster import KMeans

    sizes = np.abs(activity).T
    sizes = sizes - sizes.mean(1, keepdims=True)
    sizes /= np.linalg.norm(sizes, axis=1, keepdims=True) + 1e-12
    if len(sizes) <= groups:
        return np.arange(len(sizes))
    return np.asarray(KMeans(groups, n_init=1, random_state=0).fit(sizes).labels_, np.int64)


def share_assigned(labels: NDArray[np.int64], energies: NDArray[np.float64]) -> float:
    """Return the share of the vectors' energy that lies in the unit their group is matched to, under the best matching.

    Args:
        labels: group of each vector, (m,), int64; -1 for none, which counts as wrong.
        energies: share of each vector in each unit, (m, hidden): one 1 in the row of a copied coordinate.
    """
    from scipy.optimize import linear_sum_assignment

    total = float(energies.sum())
    if total <= 0 or labels.max(initial=-1) < 0:
        return 0.0
    groups = np.zeros((int(labels.max()) + 1, energies.shape[1]))
    np.add.at(groups, labels[labels >= 0], energies[labels >= 0])
    rows, columns = linear_sum_assignment(groups, maximize=True)
    return float(groups[rows, columns].sum()) / total


def neighbours(activity: Rows) -> NDArray[np.int64]:
    """Return for each column of ``activity`` (n, m) the other column with the largest absolute correlation, (m,)."""
    columns = activity - activity.mean(0)
    columns /= np.linalg.norm(columns, axis=0) + np.float32(1e-30)
    nearest = np.empty(columns.shape[1], np.int64)
    for start in range(0, len(nearest), 1024):
        part = np.abs(columns[:, start : start + 1024].T @ columns)
        part[np.arange(len(part)), np.arange(start, start + len(part))] = -1
        nearest[start : start + 1024] = part.argmax(1)
    return nearest


def agreement(nearest: NDArray[np.int64], energies: NDArray[np.float64]) -> float:
    """Return how likely a vector and its neighbour are of one hidden unit: the mean product of their energies.

    Args:
        nearest: index of each vector's neighbour, (m,), int64.
        energies: share of each vector in each unit, (m, hidden).
    """
    inside = energies.sum(1) > 0
    both = (energies * energies[nearest]).sum(1)
    return float(both[inside].mean()) if inside.any() else 0.0


def one_hot(unit: NDArray[np.int64], hidden: int) -> NDArray[np.float64]:
    """Return the energies (m, hidden) of coordinates of the given units, (m,), int64; a row of zeros for unit ``hidden``."""
    return np.asarray((unit[:, None] == np.arange(hidden)).astype(np.float64))


ITERATIONS: Final = 30
TINY: Final = 1e-6
"""Components with a smaller share of the largest one's variance are rounding."""


class Components(NamedTuple):
    """Components of updates.

    Attributes:
        activity: activity of each component in each update, (n, k), uncorrelated, variance 1.
        directions: direction of each component in the space of the updates, (k, d), float32.
    """

    activity: NDArray[np.float64]
    directions: Rows


def whiten(updates: Rows, most: int) -> tuple[NDArray[np.float64], Rows]:
    """Return the principal components' activities (n, k) with variance 1, and the centred updates (n, d) of norm 1 before."""
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    rows = updates / np.maximum(norms, np.float32(1e-30))
    rows -= rows.mean(0)
    n, d = rows.shape
    if n <= d:
        variance, axes = np.linalg.eigh((rows @ rows.T).astype(np.float64))
        scores = axes[:, ::-1] * np.sqrt(n)
    else:
        variance, axes = np.linalg.eigh((rows.T @ rows).astype(np.float64))
        kept = np.maximum(variance[::-1], TINY * variance[-1])
        scores = rows @ axes[:, ::-1] * np.sqrt(n / kept)
    count = min(most, int((variance > TINY * variance[-1]).sum()))
    return np.ascontiguousarray(scores[:, :count], np.float64), rows


def independent(white: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return independent activities (n, k), a rotation of the ``white`` ones (n, k)."""
    n, k = white.shape
    z = white.astype(np.float32)
    w = np.eye(k)
    for _ in range(ITERATIONS):
        bent = np.tanh(z @ w.astype(np.float32))
        w = (z.T @ bent).astype(np.float64) / n - w * (1 - bent * bent).mean(0, dtype=np.float64)
        size, axes = np.linalg.eigh(w.T @ w)
        w = w @ (axes / np.sqrt(np.maximum(size, 1e-12))) @ axes.T
    return np.asarray(white @ w, np.float64)


def analyse(updates: Rows, most: int = 0, rng: np.random.Generator | None = None) -> Components:
    """Return the independent components of updates (n, d): at most ``most``, and half as many as updates or fewer.

    With ``rng`` it returns a random rotation of the principal components instead: the null, which has no analysis.
    """
    bound = max(2, len(updates) // 2)
    white, rows = whiten(updates, min(most, bound) if most else bound)
    if rng is None:
        activity = independent(white)
    else:
        activity = white @ np.linalg.qr(rng.standard_normal((white.shape[1], white.shape[1])))[0]
    return Components(activity, activity.T.astype(np.float32) @ rows)
