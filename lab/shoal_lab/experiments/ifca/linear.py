"""Mixtures of linear models, and many starts of IFCA on one of them at once (Ghosh et al., sections 5.1 and 6.1).

A start is k first models and a step size. All starts of a trial share the data, so their residuals are one matrix
product a block of devices, and the block is read once for scoring and for the gradients. The semantics are those of
`aggregator.strategies.ifca.strategy` with ``option = gradient``: each device takes the model of least loss on its own samples
(the lowest index on ties), its update is one full-batch step of the mean squared error, and each model moves by the mean of
those who chose it times their share of all m machines (Alg. 1, line 14), which the server computes on masked updates.

Letters in shapes: r starts, k models, m devices, n samples a device, d coordinates, and c devices of a block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crypto.mask.derivation import MaskKey
from shoal.simulation.engine.masks import RoundMasks

BLOCK_BYTES: Final = 4 << 20
"""Bytes of samples per block: small enough for a core's share of the cache."""

WINDOW: Final = 10
"""Iterations between two checks of whether a start can still succeed or fail."""

DIVERGED: Final = 1000.0
"""A start is abandoned when its distance to the truth has grown by this factor."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """m devices with n samples each of k linear models.

    Attributes:
        x: shape (m, n, d), float32; y: shape (m, n), float32: y = <x, truth of the device's group> + noise.
        truth: shape (k, d), float32; groups: shape (m,), int64, equal in size.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """The final states of r starts.

    Attributes:
        thetas: shape (r, k, d), float32, the last models.
        choices: shape (r, m), int64, the devices' last choices.
        distances: shape (r,), float32, mean distance to the truth under the best matching; inf if the start diverged.
        iterations: shape (r,), int64, iterations of each start.
    """

    thetas: Tensor
    choices: Tensor
    distances: Tensor
    iterations: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a curve.

    Attributes:
        k: groups; m: devices, a multiple of k; n: samples a device; d: coordinates.
        scale: R; sigma: standard deviation of the noise.
        norm: R is the l2 norm of each true model, as the paper's text has it, and not the value of its coordinates
            that are not 0, as the authors' code has it.
    """

    k: int
    m: int
    n: int
    scale: float
    sigma: float
    d: int = 1000
    norm: bool = False


def make_mixture(point: Point, seed: tuple[int, ...], device: str = "cpu") -> Mixture:
    """Return a mixture whose true coordinates are 0 or R, each with probability one half.

    Points that differ only in R and sigma use the same draws otherwise, so that a curve over R shows the effect of R alone.

    Args:
        point: the mixture's parameters.
        seed: seed of every draw.
        device: torch device of the tensors.
    """
    m, n, d, k = point.m, point.n, point.d, point.k
    rng = np.random.default_rng([*seed, m, n, d, k])
    bits = rng.integers(0, 2, (k, d)).astype(np.float32)
    length = np.sqrt(np.maximum(bits.sum(1, keepdims=True), 1)) if point.norm else np.float32(1)
    truth = (bits * (point.scale / length)).astype(np.float32)
    x = rng.standard_normal((m, n, d), np.float32)
    noise = rng.standard_normal((m, n), np.float32) * np.float32(point.sigma)
    groups = np.arange(m) * k // m
    y = np.einsum("mnd,md->mn", x, truth[groups]) + noise
    return Mixture(*(torch.from_numpy(a).to(device) for a in (x, y, truth, groups)))


def random_starts(count: int, k: int, d: int, seed: tuple[int, ...], device: str = "cpu") -> Tensor:
    """Return first models (count, k, d), float32: each coordinate 0 or 1 with probability one half (section 6.1)."""
    draws = np.random.default_rng([*seed, k, d]).integers(0, 2, (count, k, d))
    return torch.from_numpy(draws.astype(np.float32)).to(device)


def matched_distance(thetas: Tensor, truth: Tensor) -> Tensor:
    """Return (1/k) sum_j |theta_j - theta*_pi(j)| (r,) for the best permutation pi.

    Args:
        thetas: shape (r, k, d).
        truth: shape (k, d).
    """
    k = len(truth)
    costs = torch.linalg.vector_norm(thetas[:, :, None] - truth, dim=3)
    every = torch.tensor(list(itertools.permutations(range(k))), device=thetas.device)
    matched: Tensor = costs[:, torch.arange(k, device=thetas.device), every].mean(2).amin(1)
    return matched


def permutation_of(key: MaskKey, d: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the gathers (d,) that mask and unmask: masked = vector[first], vector = masked[second].

    Read off the real mask by masking 0, 1, ..., d - 1, which float32 holds exactly.
    """
    masked = np.empty(d, np.float32)
    key.apply(np.arange(d, dtype=np.float32), masked)
    order = masked.astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(d)):
        raise ValueError("the batched linear experiment supports only masks that permute coordinates")
    return order, np.argsort(order)


def one_at_a_time(
    mixture: Mixture, start: Tensor, rate: float, iterations: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the models (k, d) and choices (m,) of one start, computed device by device and model by model.

    The reference that `Batch` must equal, and the baseline for its speed. ``start`` has shape (k, d).
    """
    x, y = mixture.x.cpu().numpy(), mixture.y.cpu().numpy()
    thetas = start.cpu().numpy().copy()
    m, n, _ = x.shape
    choices = np.zeros(m, np.int64)
    for _ in range(iterations):
        sums = np.zeros_like(thetas)
        for i in range(m):
            residuals = [x[i] @ theta - y[i] for theta in thetas]
            choices[i] = j = int(np.argmin([np.mean(r * r) for r in residuals]))
            sums[j] += x[i].T @ residuals[j] * np.float32(2 / n)
        thetas -= np.float32(rate / m) * sums
    return thetas, choices


class Batch:
    """r starts of IFCA on one mixture, one `step` an iteration.

    Attributes:
        models: shape (r, k, d), float32, as devices hold them.
        moves: shape (r, k, d), float32, masked, of the last step: the means that the server relays.
        choices: shape (r, m), int64, of the last step.
    """

    def __init__(self, mixture: Mixture, starts: Tensor, rates: Tensor, masks: RoundMasks | None = None) -> None:
        """Begin at ``starts`` (r, k, d) with the step sizes ``rates`` (r,); without ``masks`` the server sees clear moves."""
        self.mixture = mixture
        self.models = starts
        self.moves = torch.zeros_like(starts)
        self.rates = rates
        self.masks = masks
        self.round = 0
        m, n, d = mixture.x.shape
        self.block = max(1, BLOCK_BYTES // (4 * n * d))
        self.choices = torch.zeros((len(starts), m), dtype=torch.int64, device=starts.device)

    def keep(self, chosen: Tensor) -> None:
        """Drop the starts that ``chosen`` (r,), bool, leaves out."""
        self.models, self.moves = self.models[chosen], self.moves[chosen]
        self.rates, self.choices = self.rates[chosen], self.choices[chosen]

    def step(self) -> Tensor:
        """Do one round of every start and return how far its models moved on average, (r,), float32."""
        x, y = self.mixture.x, self.mixture.y
        m, n, d = x.shape
        r, k, _ = self.models.shape
        models = self.models.view(r * k, d).T  # (d, r k): one column for each model
        sums = torch.zeros((r * k, d), device=x.device)
        first_model = torch.arange(r, device=x.device) * k
        for begin in range(0, m, self.block):
            xb = x[begin : begin + self.block]
            c = len(xb)
            # One product for the models of all starts: they share the data.
            residuals = torch.mm(xb.reshape(c * n, d), models).view(c, n, r * k)
            residuals.sub_(y[begin : begin + c, :, None])
            choice = residuals.square().mean(1).view(c, r, k).argmin(2)  # (c, r): the model of least loss
            index = choice[:, None, :, None].expand(c, n, r, 1)
            chosen_residuals = residuals.view(c, n, r, k).gather(3, index).squeeze(3)  # (c, n, r)
            gradients = torch.bmm(chosen_residuals.transpose(1, 2), xb)  # (c, r, d), without the factor 2/n
            sums.index_add_(0, (first_model + choice).view(-1), gradients.view(c * r, d))
            self.choices[:, begin : begin + c] = choice.T
        # 2/n is the gradient's factor; 1/m is the server's: the mean of those who chose, times their share of all devices.
        moves = sums.view(r, k, d) * (self.rates * (-2.0 / (n * m)))[:, None, None]
        self.models = self.models + self._relayed(moves)
        moved: Tensor = torch.linalg.vector_norm(moves, dim=2).mean(1)
        return moved

    def _relayed(self, moves: Tensor) -> Tensor:
        """Return the clear ``moves`` (r, k, d) as devices get them from the server, which has them under the round's mask."""
        self.round += 1
        self.moves = moves
        if self.masks is None:
            return moves
        key = self.masks.take(self.round)
        first, second = (torch.from_numpy(g).to(moves.device) for g in permutation_of(key, moves.shape[2]))
        self.moves = moves[..., first]
        return self.moves[..., second]


def run_starts(
    mixture: Mixture,
    starts: Tensor,
    rates: Tensor,
    *,
    iterations: int,
    threshold: float,
    masks: RoundMasks | None = None,
    settle: bool = False,
    first_success: bool = False,
) -> Endings:
    """Run ``iterations`` of IFCA from every start.

    Args:
        mixture: the data.
        starts: shape (r, k, d), float32.
        rates: shape (r,), float32, step sizes.
        iterations: T.
        threshold: largest distance that is a success.
        masks: masks of the rounds; None works in the clear.
        settle: check every `WINDOW` iterations whether a start can stop early: if the fastest pace of the last window
            could not carry it across ``threshold`` in the remaining iterations, or if it has `DIVERGED`. A pace can grow,
            so this is a heuristic; False runs every iteration.
        first_success: stop all starts as soon as one has settled as a success.
    """
    batch = Batch(mixture, starts, rates, masks)
    live = torch.arange(len(starts), device=starts.device)  # indices of the starts that still run
    thetas, choices = starts.clone(), batch.choices.clone()
    distances = torch.full((len(starts),), torch.inf, device=starts.device)
    counts = torch.zeros(len(starts), dtype=torch.int64, device=starts.device)
    first_distances = matched_distance(starts, mixture.truth)
    pace = torch.zeros(len(starts), device=starts.device)  # each live start's largest step in this window
    for done in range(1, iterations + 1):
        pace = torch.maximum(pace, batch.step())
        if done % WINDOW and done < iterations:
            continue
        current = batch.models
        distance = matched_distance(current, mixture.truth)
        finite = torch.isfinite(distance)
        thetas[live], choices[live], counts[live] = current, batch.choices, done
        distances[live] = torch.where(finite, distance, torch.inf)
        continuing = finite
        if settle:
            # A start is decided if it can't cross the threshold any more, in either direction.
            undecided = (distance - threshold).abs() <= pace * (iterations - done)
            continuing = finite & undecided & (distance <= DIVERGED * first_distances[live])
            if first_success and bool((distances[live][~undecided & finite] <= threshold).any()):
                break
        if not bool(continuing.any()):
            break
        batch.keep(continuing)
        live, pace = live[continuing], torch.zeros(int(continuing.sum()), device=starts.device)
    return Endings(thetas, choices, distances, counts)
