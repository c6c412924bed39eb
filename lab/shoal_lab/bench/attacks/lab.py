"""The setting of all attacks: a real task, private and public data, a device's training, and the real masks.

No mask or training step is re-implemented: vectors are computed by `edge_client.learning.training` on the compiled task and
masked by `crypto.mask`. The lab holds every secret; each attack uses only the values that its attacker would have. Its `Result`
is its success and that of guessing, in the same unit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from crypto.mask.derivation import MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import RoundKeys, VersionKey
from edge_client.learning.data import Dataset
from edge_client.learning.model import OrtModel
from edge_client.learning.training import train
from edge_client.run.policy import check_announcement, check_mean
from shoal.demo.data import load_images
from shoal.owner.task_compiler.builtin import TaskSource, build
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.origin import make_origins
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Announcement
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.protocol.states import (
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    StateId,
    StateRecipe,
    Step,
    Term,
)
from shoal.simulation.process_fleet import Stage
from shoal.task.bundle import TaskBundle
from shoal.types import Float32Vector, MaskedVector, Segment

T = TypeVar("T")

FLEET: Final = "lab"
RUN_ID: Final = b"privacy-bench-00"
KEY_VERSION: Final = 1
CLASSES: Final = 10
LR: Final = 0.1
ONE_STEP: Final = LocalTraining(epochs=0, steps=1, batch_size=0, lr=LR)
"""One gradient step on everything: the update is the gradient, the easiest case for every attack."""
ONE_EPOCH: Final = LocalTraining(epochs=1, batch_size=10, lr=LR)
MOST_IMAGES: Final = 10_000
"""Number of MNIST's images that are private, and of those that the attacker has."""

MIN_CONTRIBUTORS: Final = 3
ROUNDS: Final = 50

Rows = NDArray[np.float32]
Lifetime = Literal["run", "round"]
LIFETIMES: Final[tuple[Lifetime, ...]] = ("run", "round")
SPIKE: Final = 20.0
"""How far a spike moves its one coordinate: far below the norm limit."""
Keeps = Literal["order", "values", "magnitudes", "lengths"]
"""The part of a vector that a mode preserves: everything; the multiset of values; that of absolute values; only the norm."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a report, (side, side), float32 in [0, 1], with its caption."""

    caption: str
    image: NDArray[np.float32] = field(repr=False)


def picture(caption: str, image: NDArray[Any]) -> Picture:
    """Return a picture of a square image (pixels,)."""
    side = math.isqrt(image.size)
    return Picture(caption, np.asarray(image, np.float32).reshape(side, side))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one attack on one mode; in every unit a larger value is better for the attacker.

    Attributes:
        name: the attack, with its variant.
        attacker: the attacker and the attacker's knowledge.
        success, chance: in ``unit``; chance is the best guess without the masked vectors, or the same attack on noise.
        unit: share, dB, cosine, AUC, accuracy or ARI.
        margin: the attack works if success exceeds chance by more than this.
        note: further findings, in one line.
        pictures: the true image first, then the reconstructions.
        keys: how long one mask key lasts: a ``round``, as in fleets, or the ``run``, for comparison.
        devices: devices whose uploads the attack uses in one round.
    """

    name: str
    attacker: str
    success: float
    chance: float
    unit: str
    margin: float = 0.1
    note: str = ""
    pictures: tuple[Picture, ...] = ()
    keys: str = "run"
    devices: int = 1

    @property
    def works(self) -> bool:
        """Whether the attack got more than guessing does."""
        return self.success > self.chance + self.margin

    def data(self) -> dict[str, Any]:
        """Return the figures as JSON takes them, without pictures."""
        return {
            "name": self.name,
            "attacker": self.attacker,
            "success": self.success,
            "chance": self.chance,
            "unit": self.unit,
            "works": self.works,
            "note": self.note,
            "keys": self.keys,
            "devices": self.devices,
        }


@dataclass(frozen=True, slots=True)
class Attack:
    """An entry of the registry.

    Attributes:
        name: a short name, without variants.
        source: the publication that it is from.
        attacker: the attacker and the attacker's knowledge.
        run: (lab, mode) -> one result for each variant.
    """

    name: str
    source: str
    attacker: str
    run: Callable[[Lab, str], Sequence[Result]]


PSNR_CAP_DB = 120.0
"""PSNR of an exact reading, which would be infinite."""
DB_MARGIN = 3.0
"""Decibels above chance from which a picture shows more than was known before."""


def psnr_db(image: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the peak signal-to-noise ratio in dB of two images of one shape with values in [0, 1], at most 120."""
    error = float(np.mean((np.asarray(image, np.float64) - np.asarray(truth, np.float64)) ** 2))
    return PSNR_CAP_DB if error <= 0 else min(PSNR_CAP_DB, -10.0 * float(np.log10(error)))


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the cosine of two vectors (d,); 0 where one of them is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float(x @ y) / lengths if lengths else 0.0


def share_recovered(estimate: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the share of the non-zero coordinates of ``truth`` (d,) that ``estimate`` (d,) has, to a part in 1000."""
    x, y = np.asarray(estimate, np.float64), np.asarray(truth, np.float64)
    moved = y != 0
    if not moved.any():
        return 0.0
    tolerance = 1e-3 * np.abs(y) + 1e-5 * float(np.sqrt(np.mean(y**2)))
    return float((np.abs(x - y) <= tolerance)[moved].mean())


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the area under the ROC curve: the chance that a member scores above another, ties counting half."""
    a, b = np.asarray(members)[:, None], np.asarray(others)[None]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def balanced_accuracy(guess: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Return the mean over the true classes of the share guessed right, both (n,), int64."""
    return float(np.mean([(guess[truth == c] == c).mean() for c in np.unique(truth)]))


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images: x (n, side * side) float32 in [0, 1], y (n,) int64."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: NDArray[np.int64]) -> Images:
        """Return the images at ``index``."""
        return Images(self.x[index], self.y[index])

    def mean(self, label: int | None = None) -> NDArray[np.float32]:
        """Return the mean image of one class or of all, which is the best guess without any vector."""
        return np.asarray((self.x if label is None else self.x[self.y == label]).mean(0), np.float32)


@dataclass(frozen=True)
class Lab:
    """A task and its data.

    Attributes:
        private: the devices' images; public: the attacker's own, of the same kind, none in common.
        side: pixels of an image's side.
        quick: attacks take fewer trials.
        name: name of the data set.
    """

    private: Images
    public: Images
    side: int
    quick: bool
    name: str = "digits"
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def hidden(self) -> int:
        """Units of the model's hidden layer."""
        return 64 if self.side < 20 else 128

    @cached_property
    def source(self) -> TaskSource:
        """The task: the built-in MLP at the images' size."""
        return build("mlp", inputs=self.side**2, hidden=self.hidden, classes=CLASSES)

    @cached_property
    def bundle(self) -> TaskBundle:
        """The task as devices run it."""
        s = self.source
        return compile_task(s.model, s.loss, s.example, name="privacy", kind=s.kind, hyper=s.hyper)

    @cached_property
    def backend(self) -> OrtModel:
        """The task's gradient as devices compute it."""
        return OrtModel(self.bundle)

    @cached_property
    def origin(self) -> Float32Vector:
        """The model that a run starts from, (d,)."""
        sizes = {"inputs": self.side**2, "hidden": self.hidden, "classes": CLASSES}
        return np.asarray(make_origins("mlp", 1, 0, manifest=self.bundle.manifest, **sizes)[0], np.float32)

    @property
    def length(self) -> int:
        """Coordinates d of the model."""
        return self.bundle.length

    @cached_property
    def layers(self) -> NDArray[np.int64]:
        """The tensor of each coordinate, (d,), int64, counted from 0."""
        return np.concatenate([np.full(p.length, i, np.int64) for i, p in enumerate(self.bundle.manifest.parameters)])

    def rng(self, what: str) -> np.random.Generator:
        """Return the random stream of one purpose: the same at every call."""
        # Seeded by the purpose's name: adding an attack does not change the draws of the others.
        return np.random.default_rng(list(hashlib.sha256(what.encode()).digest()[:16]))

    def trials(self, full: int, quick: int) -> int:
        """Return the number of trials: ``quick`` in a quick run, else ``full``."""
        return quick if self.quick else full

    def pick(self, what: str, n: int, images: Images | None = None) -> Images:
        """Return n different private images (or some of ``images``); equal calls return the same ones.

        Args:
            what: a name that seeds the draw.
            n: number of images.
            images: the pool; the private images if None.
        """
        pool = self.private if images is None else images
        return pool.rows(self.rng(what).choice(len(pool), n, replace=False))

    def round_keys(self, round_: int = 1, owner: str = "fleet") -> RoundKeys:
        """Return the keys that a fleet's devices share in a round; another ``owner`` has others."""
        secret = hashlib.sha256(f"shoal bench privacy/{owner}".encode()).digest()
        chain = VersionKey(FLEET, KEY_VERSION, secret).begin_run(RUN_ID, first_round=1)
        chain.skip_to(round_)
        return chain.take()

    def derive(self, mode: str, length: int, round_: int = 1, owner: str = "fleet") -> MaskKey:
        """Return the mask of a round for vectors of ``length`` coordinates."""
        keys = self.round_keys(round_, owner)
        return derive(keys.mask, keys.context(self.bundle.digest, mode, (Segment("cluster", length),)))

    def key(self, mode: str, round_: int = 1, owner: str = "fleet") -> MaskKey:
        """Return the mask of a round for the task's vectors; each round has its own."""
        return self.once(("key", mode, round_, owner), lambda: self.derive(mode, self.length, round_, owner))

    def masked(self, vector: Float32Vector, mode: str, round_: int = 1) -> Float32Vector:
        """Return ``vector`` (d,) masked, as the aggregator receives it."""
        return mask(np.ascontiguousarray(vector, np.float32), self.key(mode, round_)).values

    def update(
        self, images: Images, settings: LocalTraining = ONE_STEP, *, theta: Float32Vector | None = None, seed: int = 0
    ) -> Float32Vector:
        """Return the clear update (d,) of a device with these images, from ``theta`` or the origin."""
        return self.report(images, settings, theta=theta, seed=seed)[0]

    def report(
        self, images: Images, settings: LocalTraining, *, theta: Float32Vector | None = None, seed: int = 0
    ) -> tuple[Float32Vector, float]:
        """Return the clear update (d,) and the mean loss of a device's local training."""
        start = self.origin if theta is None else theta
        assignment = np.random.default_rng(seed)
        done = train(start, Dataset(images.x, images.y), settings, self.backend, assignment, 0, lambda: False)
        return done.delta, done.mean_loss

    def fedavg(self, rounds: Sequence[Sequence[Images]], seed_step: int) -> list[Rows]:
        """Return the clear updates (n, d) of each round of FedAvg from the origin, by an epoch on each device's images."""
        theta, found = self.origin.copy(), []
        for t, parts in enumerate(rounds):
            made = [self.update(p, ONE_EPOCH, theta=theta, seed=seed_step * t + i) for i, p in enumerate(parts)]
            found.append(np.stack(made))
            theta = theta + found[-1].mean(0)
        return found

    def gradient(self, images: Images) -> Float32Vector:
        """Return the gradient (d,) at the origin, which a one-step update reveals."""
        return self.update(images) / np.float32(-LR)

    def keeps(self, mode: str) -> Keeps:
        """Return the part of a vector that ``mode`` preserves; anyone can determine it with a secret of their own."""
        vector = self.rng("keeps").standard_normal(self.length).astype(np.float32)
        image = mask(vector, self.key(mode, owner="anybody")).values
        if np.array_equal(image, vector):
            return "order"
        if np.array_equal(np.sort(image), np.sort(vector)):
            return "values"
        return "magnitudes" if np.array_equal(np.sort(abs(image)), np.sort(abs(vector))) else "lengths"

    def places(self, mode: str, round_: int = 1) -> NDArray[np.int64]:
        """Return the clear coordinate that each masked one copies: the truth that attacks are scored by, see `FleetKeys`."""
        return FleetKeys(self, mode, "round", self.length).places(round_)

    def layer_of(self, mode: str) -> NDArray[np.int64]:
        """Return the tensor that contributes most to each masked coordinate, relative to its size, (d,), int64.

        For a copied coordinate this is its own tensor. Measured by masking noise that is confined to one tensor.
        """
        return self.once(("layer", mode), lambda: self._layer_of(mode))

    def _layer_of(self, mode: str) -> NDArray[np.int64]:
        places = self.places(mode)
        if (places >= 0).all():
            return self.layers[places]
        rng, count = self.rng("layers"), self.layers.max() + 1
        energy = np.zeros((count, self.length))
        for layer in range(count):
            inside = self.layers == layer
            for _ in range(16):
                probe = (rng.standard_normal(self.length) * inside).astype(np.float32)
                # Per coordinate of the tensor, or large tensors would dominate every mixture.
                energy[layer] += self.masked(probe, mode).astype(np.float64) ** 2 / inside.sum()
        return np.asarray(energy.argmax(0), np.int64)

    def module(self) -> nn.Module:
        """Return the torch module at the origin, for an attacker who differentiates it."""
        model = build("mlp", inputs=self.side**2, hidden=self.hidden, classes=CLASSES).model
        nn.utils.vector_to_parameters(torch.from_numpy(self.origin.copy()), model.parameters())
        return model

    def once(self, what: object, make: Callable[[], T]) -> T:
        """Return ``make()``, cached under the key ``what``, for runs and keys that several attacks use."""
        if what not in self._cache:
            self._cache[what] = make()
        kept: T = self._cache[what]
        return kept

    def forget(self, mode: str) -> None:
        """Drop the keys and vectors that belong to one mode."""
        for what in [w for w in self._cache if isinstance(w, tuple) and mode in w]:
            del self._cache[what]


def make_lab(*, quick: bool, data_dir: Path | None = None, seed: int = 0) -> Lab:
    """Return a lab on scikit-learn's digits, or on MNIST where ``data_dir`` holds its files.

    Raises:
        DataError: MNIST's files are not there.
    """
    name = "digits" if data_dir is None else "mnist"
    x, y, side = load_images(name, data_dir)
    # Private and public images are disjoint, so that no attack wins by having seen a device's image.
    assignment = np.random.default_rng(seed).permutation(len(x))
    half = min(len(x) // 2, MOST_IMAGES)
    mine, yours = assignment[:half], assignment[half : 2 * half]
    return Lab(Images(x[mine], y[mine]), Images(x[yours], y[yours]), side, quick, name)


def signed_plan(lab: Lab, mode: str) -> RunPlan:
    """Return the plan of a FedAvg run of 50 rounds as the owner makes it, for the lab's task and keys."""
    return lab.once(("plan", mode), lambda: _signed_plan(lab, mode))


def _signed_plan(lab: Lab, mode: str) -> RunPlan:
    options = Recipe("fedavg", rounds=ROUNDS, mode=mode, min_contributors=MIN_CONTRIBUTORS, seed=0)
    with tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder:
        stage = Stage(Path(folder), "mqtt://nobody", ("dev-00",))
        plan = stage.add_run(lab.bundle, lab.origin[None], options)
    return dataclasses.replace(plan, fleet=FLEET, run_id=RUN_ID)


def spiked(length: int, at: int | np.int64) -> Rows:
    """Return a spike at coordinate ``at``, (length,), float32."""
    spike = np.zeros(length, np.float32)
    spike[at] = SPIKE
    return spike


def opened_mean(plan: RunPlan, key: MaskKey, round_: int, sent: Rows, limit: float) -> Rows:
    """Return the mean (d,) that a device makes of the masked one of a round, after its checks.

    Raises:
        UntrustedError: the device's policy refuses it.
        IntegrityError: it can't be unmasked.
    """
    header = MeanHeader(
        fleet=plan.fleet, run_id=plan.run_id, round=round_, key_id=key.key_id, model=0, length=plan.length, segment=""
    )
    check_mean(header, plan, "", 4 * sent.size, float(np.linalg.norm(sent.astype(np.float64))), limit)
    return unmask(MaskedVector(sent, key.key_id), key)


def device_model(lab: Lab, mode: str, mean: Float32Vector, *, contributors: int = MIN_CONTRIBUTORS) -> Float32Vector:
    """Return the model (d,) that a device makes of its origin and the masked ``mean`` (d,) of round 1, which may be forged.

    Raises:
        UntrustedError: the device's policy refuses it.
        IntegrityError: it can't be unmasked.
    """
    plan = signed_plan(lab, mode)
    recipe = StateRecipe(0, 1, (Term(0, 0, 1.0),), 1.0)
    step = RetainedStep(Step(1, (recipe,), (recipe.state,)), (MeanRef(0, "x", b"\1" * 16, contributors),))
    announcement = Announcement(
        fleet=plan.fleet,
        run=plan.run,
        run_id=plan.run_id,
        roster_sequence=plan.roster_sequence,
        round=2,
        nonce=bytes(16),
        deadline_s=60.0,
        finished=False,
        assignments=(),
        assignment_of=(),
        held=RoundModels(plan.key_version, (Offer(0, StateId(0, 1)),), (step,)),
    )
    check_announcement(announcement, plan)
    return lab.origin + opened_mean(plan, lab.key(mode), 1, np.asarray(mean, np.float32), plan.recipe.norm_limit)


class FleetKeys:
    """The keys that a run's devices share, by round: a fresh one in each, as fleets have, or that of round 1 for the run.

    One key a run is for comparison only: it shows what fresh keys are good for. No fleet has it.
    """

    def __init__(self, lab: Lab, mode: str, lifetime: Lifetime, length: int, owner: str = "fleet") -> None:
        """Prepare keys for vectors of ``length`` coordinates; another ``owner`` has independent keys."""
        self.mode, self.lifetime, self.length = mode, lifetime, length
        self._derive = lru_cache(maxsize=4)(lambda round_: lab.derive(mode, length, round_, owner))

    def key(self, round_: int) -> MaskKey:
        """Return the mask key of a round; under lifetime ``run`` every round has that of round 1."""
        return self._derive(round_ if self.lifetime == "round" else 1)

    def masked(self, rows: Rows, round_: int) -> Rows:
        """Return ``rows`` (n, d) masked under a round's key."""
        key = self.key(round_)
        return np.stack([mask(np.ascontiguousarray(row, np.float32), key).values for row in rows])

    def unmasked(self, rows: Rows, round_: int) -> Rows:
        """Return ``rows`` (n, d) without the mask of a round's key."""
        key = self.key(round_)
        return np.stack([unmask(MaskedVector(np.ascontiguousarray(row, np.float32), key.key_id), key) for row in rows])

    def places(self, round_: int) -> NDArray[np.int64]:
        """Return the clear coordinate that each masked one copies, up to sign, (d,), int64; -1 for a mixture.

        Read from the mask's own output on 1, 2, 3, ...
        """
        ramp = np.arange(1, self.length + 1, dtype=np.float32)
        image = np.abs(self.masked(ramp[None], round_)[0])
        copied = np.array_equal(np.sort(image), ramp)
        return image.astype(np.int64) - 1 if copied else np.full(self.length, -1, np.int64)
