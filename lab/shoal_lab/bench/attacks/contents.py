"""Attacks that read a device's data from one update: its labels, its images, their grey levels, and who is a member.

Each attack is a function from the lab and a mask mode to its results; its docstring names the publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from crypto.mask.masking import mask
from shoal.owner.task_compiler.builtin import build
from shoal.protocol.recipe import LocalTraining
from shoal.types import Float32Vector
from shoal_lab.bench.attacks.lab import (
    CLASSES,
    DB_MARGIN,
    LR,
    Attack,
    Images,
    Lab,
    Picture,
    Result,
    auc,
    cosine,
    picture,
    psnr_db,
)

BATCH: Final = 32
CLASSES_PRESENT: Final = 5
"""Classes that a batch is drawn from, so that guessing the usual mixture is half wrong."""
KNOWS_IMAGES: Final = (
    "aggregator with the initial model, the model's layout and images of the same kind; it places no mask"
)


def counts_of(gradient: NDArray[np.float32], mean_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counts (classes,) of a batch of 32 read from a gradient (d,) as if it were clear.

    Args:
        gradient: the last ``classes`` coordinates are taken as the last bias's.
        mean_p: shape (classes,), the model's mean output on other images.
    """
    counts = np.clip(BATCH * (mean_p - gradient[-CLASSES:]), 0.0, None)
    total = counts.sum()
    return counts / total * BATCH if total > 0 else np.full(CLASSES, BATCH / CLASSES)


def overlap(guess: NDArray[np.float64], truth: NDArray[np.int64]) -> float:
    """Return the share of a batch's labels that two counts (classes,) have in common."""
    return 1.0 - float(np.abs(np.round(guess) - truth).sum()) / (2 * BATCH)


def label_counts(lab: Lab, mode: str) -> list[Result]:
    """Return the mean overlap of the counts of labels in batches of five classes, each under a mask of its own.

    For softmax and cross-entropy the gradient of the last bias is mean(p) - counts / n, and p hardly moves with the image in a
    young model: Zhao et al., "iDLG: Improved Deep Leakage from Gradients" (2020), for one image; Wainakh et al., "User-Level
    Label Leakage from Gradients in Federated Learning" (2022), for counts.
    """
    outputs = lab.backend.predict(lab.origin, lab.public.x).astype(np.float64)
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    mean_p = (p / p.sum(1, keepdims=True)).mean(0)
    rng, got, guessed = lab.rng("label counts"), [], []
    for trial in range(lab.trials(40, 12)):
        classes = rng.choice(CLASSES, CLASSES_PRESENT, replace=False)
        pool = np.flatnonzero(np.isin(lab.private.y, classes))
        batch = lab.private.rows(rng.choice(pool, BATCH, replace=False))
        truth = np.bincount(batch.y, minlength=CLASSES)
        seen = lab.masked(lab.update(batch), mode, round_=1 + trial % 6) / np.float32(-LR)
        got.append(overlap(counts_of(seen, mean_p), truth))
        guessed.append(overlap(np.bincount(lab.public.y, minlength=CLASSES) / len(lab.public) * BATCH, truth))
    return [
        Result(
            name="label counts of a batch",
            attacker=KNOWS_IMAGES,
            success=float(np.mean(got)),
            chance=float(np.mean(guessed)),
            unit="share",
            note="chance guesses the usual mixture of classes",
        )
    ]


BATCHES: Final = (1, 16, 64)
KNOWS_LAYOUT: Final = "aggregator with the model's layout and nothing else; the update is one step on one batch"


def read_rows(gradient: NDArray[np.float32], lab: Lab) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the images (units, pixels), clipped to [0, 1], and the bias gradients (units,) that a gradient (d,) shows."""
    units, pixels = lab.bundle.manifest.parameters[0].shape
    weights = gradient[: units * pixels].reshape(units, pixels).astype(np.float64)
    bias = gradient[units * pixels : units * (pixels + 1)].astype(np.float64)
    safe = np.where(np.abs(bias) > 1e-12, bias, np.inf)
    return np.clip(weights / safe[:, None], 0.0, 1.0), bias


def nearest(images: NDArray[np.float64], truth: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return that of ``images`` (n, pixels) with the smallest distance to ``truth`` (pixels,)."""
    return np.asarray(images[((images - truth) ** 2).mean(1).argmin()], np.float64)


def first_layer(lab: Lab, mode: str) -> list[Result]:
    """Return the mean PSNR of images read from a fully connected first layer, for each batch size.

    Row j of the weights' gradient is the sum of g_ij x_i over the images, the bias's is the sum of g_ij. With one image the
    quotient is the image, exactly: Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption" (2018).
    With more it is a mixture, and images that alone excite a unit still come out whole: Boenisch et al., "When the Curious
    Abandon Honesty" (2023).

    Of one image, the row with the largest bias gradient is the reading. Of several, every row is one, and each true
    image is compared with the nearest: an attacker who knows good from bad. Chance has the same privilege over as
    many images of the public's.
    """
    return [_batch(lab, mode, size) for size in BATCHES]


def _batch(lab: Lab, mode: str, size: int) -> Result:
    got, guessed = [], []
    pictures: tuple[Picture, ...] = ()
    for trial in range(lab.trials(12, 6)):
        batch = lab.pick(f"first layer {size} {trial}", size)
        rows, bias = read_rows(lab.masked(lab.update(batch), mode, round_=1 + trial % 6) / np.float32(-LR), lab)
        if size == 1:
            rows, others = rows[[int(np.abs(bias).argmax())]], lab.public.mean()[None].astype(np.float64)
        else:
            others = lab.pick(f"others {trial}", len(rows), lab.public).x.astype(np.float64)
        readings = [nearest(rows, x) for x in batch.x]
        got.append(np.mean([psnr_db(r, x) for r, x in zip(readings, batch.x, strict=True)]))
        guessed.append(np.mean([psnr_db(nearest(others, x), x) for x in batch.x]))
        if not trial:
            pictures = (picture("true", batch.x[0]), picture(f"first layer, batch {size}", readings[0]))
    guess = "the mean image" if size == 1 else "the nearest of as many public images"
    return Result(
        name=f"first-layer input, batch {size}",
        attacker=KNOWS_LAYOUT,
        success=float(np.mean(got)),
        chance=float(np.mean(guessed)),
        unit="dB",
        margin=DB_MARGIN,
        note=f"PSNR; chance shows {guess}",
        pictures=pictures,
    )


KNOWS_MODEL_AND_LABEL: Final = "aggregator with the clear model, the image's label and a one-image, one-step update"
STEPS: Final = 120
ADAM_STEPS: Final = 600
ADAM_LR: Final = 0.05

VIEWS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "DLG": lambda g: g,
    "DLG on sorted values": lambda g: g.sort()[0],
    "DLG on sorted absolute values": lambda g: g.abs().sort()[0],
    "DLG on norms": lambda g: g.norm()[None],
}
"""Views of a gradient, by the variant that compares them."""


def gradient_of(model: nn.Module, x: Tensor, y: Tensor, *, differentiable: bool) -> Tensor:
    """Return the gradient (d,) of the cross-entropy of x (1, ...) and y (1,)."""
    loss = functional.cross_entropy(model(x), y)
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=differentiable)
    return torch.cat([p.reshape(-1) for p in parts])


def match(
    model: nn.Module, seen: Float32Vector, label: int, start: NDArray[np.float32], view: str, *, adam: bool
) -> tuple[NDArray[np.float32], float]:
    """Return the image, (pixels,) in [0, 1], whose gradient is closest to ``seen`` (d,), and the remaining distance.

    Args:
        model: the model at the origin.
        seen: the gradient that the attacker observes.
        label: the image's label.
        start: the initial image, in the model's input shape.
        view: a key of `VIEWS`.
        adam: take many steps of Adam instead of L-BFGS.
    """
    x = torch.from_numpy(start.copy())[None].requires_grad_()
    y = torch.tensor([label])
    look = VIEWS[view]
    target = look(torch.from_numpy(seen))
    # Relative to the target, so that tolerances and step sizes suit every view.
    scale = 1.0 / float((target**2).sum())

    def distance() -> Tensor:
        difference = look(gradient_of(model, x, y, differentiable=True)) - target
        return (difference**2).sum() * scale

    if adam:
        _adam(x, distance)
    else:
        _lbfgs(x, distance)
    left = float(distance().detach())
    image: NDArray[np.float32] = x.detach().clamp(0, 1).reshape(-1).numpy()
    return image, left


def _lbfgs(x: Tensor, distance: Callable[[], Tensor]) -> None:
    optimiser = torch.optim.LBFGS(
        [x], max_iter=STEPS, history_size=50, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        value = distance()
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return float(value.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _adam(x: Tensor, distance: Callable[[], Tensor]) -> None:
    optimiser = torch.optim.Adam([x], lr=ADAM_LR)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, ADAM_STEPS, ADAM_LR / 50)
    for _ in range(ADAM_STEPS):
        optimiser.zero_grad()
        distance().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
        slower.step()
        with torch.no_grad():
            x.clamp_(0, 1)


def gradient_matching(lab: Lab, mode: str) -> list[Result]:
    """Return the mean PSNR of each variant on the MLP and, unless quick, of plain matching on a CNN.

    An image is changed until its gradient matches the observed one: Zhu et al., "Deep Leakage from Gradients" (2019), with
    L-BFGS; Geiping et al., "Inverting Gradients" (2020), with Adam on a convolutional network. Some variants account for the
    mask: a permutation preserves the sorted values, signs preserve the sorted absolute values, and every mask the norm.

    It starts from the label's mean image, and on the MLP from noise as well. The result that fits better counts, which the
    attacker can determine without the truth.
    """
    images = lab.pick("gradient matching", lab.trials(3, 2))
    guesses = [psnr_db(lab.public.mean(int(y)), x) for x, y in zip(images.x, images.y, strict=True)]
    seen = [lab.masked(lab.gradient(images.rows(np.array([i]))), mode) for i in range(len(images))]
    flat = (lab.side**2,)
    results = [_matched(lab, f"{view}, MLP", lab.module(), seen, images, flat, view, guesses) for view in VIEWS]
    if not lab.quick:
        model = _cnn(lab)
        picked = images.rows(np.arange(2))
        seen = [_masked_gradient(lab, mode, model, picked.rows(np.array([i]))) for i in range(2)]
        results.append(_matched(lab, "DLG, CNN", model, seen, picked, (1, lab.side, lab.side), "DLG", guesses[:2]))
    return results


def _matched(
    lab: Lab,
    name: str,
    model: nn.Module,
    seen: list[Float32Vector],
    images: Images,
    shape: tuple[int, ...],
    view: str,
    guesses: list[float],
) -> Result:
    found = []
    for gradient, label in zip(seen, images.y, strict=True):
        starts = [lab.public.mean(int(label)).reshape(shape)]
        if len(shape) == 1:
            starts.append(lab.rng("gradient matching, start").random(shape).astype(np.float32))
        tries = [match(model, gradient, int(label), start, view, adam=len(shape) > 1) for start in starts]
        found.append(min(tries, key=lambda one: one[1])[0])  # by the distance, which the attacker knows
    return Result(
        name=name,
        attacker=KNOWS_MODEL_AND_LABEL,
        success=float(np.mean([psnr_db(a, b) for a, b in zip(found, images.x, strict=True)])),
        chance=float(np.mean(guesses)),
        unit="dB",
        margin=DB_MARGIN,
        note="PSNR; chance shows the mean image of the label",
        pictures=(picture("true", images.x[0]), picture(name, found[0])),
    )


def _cnn(lab: Lab) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build("cnn", side=lab.side, filters1=8, filters2=16, hidden=32, classes=CLASSES, kernel=3).model


def _masked_gradient(lab: Lab, mode: str, model: nn.Module, image: Images) -> Float32Vector:
    x = torch.from_numpy(image.x).reshape(1, 1, lab.side, lab.side)
    step = gradient_of(model, x, torch.from_numpy(image.y), differentiable=False).numpy() * np.float32(-LR)
    return mask(step, lab.derive(mode, step.size)).values / np.float32(-LR)


KNOWS_GRADES: Final = "aggregator that knows that the update is one step on one image, and how finely pixels are graded"
SCALES: Final = 24
"""Most repeated values that are tried as a unit's full level."""
BEST: Final = 6
TOLERANCE: Final = 2e-5


def levels_of(lab: Lab) -> int:
    """Return the number of grey levels above black in the images."""
    return 16 if lab.name == "digits" else 255


def histogram(values: NDArray[np.float32], levels: int) -> NDArray[np.float64]:
    """Return the share of each level from 1 to ``levels``, (levels,), read from a gradient's values in any order."""
    size = np.abs(values[values != 0]).astype(np.float64)
    repeated, counts = np.unique(size.astype(np.float32), return_counts=True)
    # Fully white pixels repeat the value of the highest level, so frequent values are good guesses of it.
    likely = repeated[np.argsort(-counts, kind="stable")[:SCALES]].astype(np.float64)
    tried = []
    for value in likely:
        for level in range(max(1, levels - 15), levels + 1):
            steps = size * level / value
            whole = np.rint(steps)
            fits = (np.abs(steps - whole) < TOLERANCE * whole) & (whole >= 1) & (whole <= levels)
            tried.append((int(fits.sum()), np.bincount(whole[fits].astype(int), minlength=levels + 1)[1:]))
    tried.sort(key=lambda one: -one[0])
    total = np.sum([found for _, found in tried[:BEST]], axis=0).astype(np.float64)
    return np.asarray(total / max(total.sum(), 1.0), np.float64)


def true_histogram(x: NDArray[np.float32], levels: int) -> NDArray[np.float64]:
    """Return the share of each level from 1 to ``levels`` among the pixels of ``x`` that are not black."""
    counts = np.bincount(np.rint(x.ravel() * levels).astype(int), minlength=levels + 1)[1:].astype(np.float64)
    return np.asarray(counts / counts.sum(), np.float64)


def pixel_values(lab: Lab, mode: str) -> list[Result]:
    """Return how much of the histogram of an image's grey levels is right, over images; chance is the mean histogram.

    A permutation does not hide the set of values. The first layer's gradient of one image is g_j x_i, so each unit's values are
    the pixels' levels times one factor. Levels are multiples of 1/16 or 1/255, so the right factor is the one that makes most
    values whole levels. The structure is that of Phong et al. (2018), without positions.
    """
    levels, got, guessed = levels_of(lab), [], []
    usual = true_histogram(lab.public.x, levels)
    for trial in range(lab.trials(12, 6)):
        image = lab.pick(f"pixel values {trial}", 1)
        truth = true_histogram(image.x, levels)
        found = histogram(lab.masked(lab.gradient(image), mode, round_=1 + trial % 6), levels)
        got.append(np.minimum(found, truth).sum())
        guessed.append(np.minimum(usual, truth).sum())
    return [
        Result(
            name="grey levels of an image",
            attacker=KNOWS_GRADES,
            success=float(np.mean(got)),
            chance=float(np.mean(guessed)),
            unit="share",
            margin=0.1,
            note="overlap of histograms; chance is the usual histogram",
        )
    ]


KNOWS_CANDIDATES: Final = "aggregator with the clear model and candidate images with labels"
MEMBERS: Final = 40
TRAINING: Final = LocalTraining(epochs=3, batch_size=20, lr=0.1)


def membership(lab: Lab, mode: str) -> list[Result]:
    """Return the mean AUC over devices of 40 images, three local epochs each, against as many other images.

    The score is the cosine of an image's gradient and the update: Nasr et al., "Comprehensive Privacy Analysis of Deep Learning"
    (2019), reduced to the strongest single feature that a cosine-computing server has; Shokri et al. (2017) for the question.
    """
    scores = []
    for device in range(lab.trials(24, 12)):
        both = lab.pick(f"membership {device}", 2 * MEMBERS)
        members = both.rows(np.arange(MEMBERS))
        seen = lab.masked(lab.update(members, TRAINING, seed=device), mode, round_=1 + device)
        near = [cosine(seen, -lab.gradient(both.rows(np.array([i])))) for i in range(2 * MEMBERS)]
        scores.append(auc(near[:MEMBERS], near[MEMBERS:]))
    return [
        Result(
            name="membership of an image",
            attacker=KNOWS_CANDIDATES,
            success=float(np.mean(scores)),
            chance=0.5,
            unit="AUC",
            margin=0.1,
        )
    ]


ATTACKS: Final = (
    Attack("label counts", "Zhao et al. 2020 (iDLG); Wainakh et al. 2022", KNOWS_IMAGES, label_counts),
    Attack("first-layer input", "Phong et al. 2018; Boenisch et al. 2023", KNOWS_LAYOUT, first_layer),
    Attack("gradient matching", "Zhu et al. 2019 (DLG); Geiping et al. 2020", KNOWS_MODEL_AND_LABEL, gradient_matching),
    Attack("value multiset", "Phong et al. 2018, without places", KNOWS_GRADES, pixel_values),
    Attack("membership", "Nasr et al. 2019; Shokri et al. 2017", KNOWS_CANDIDATES, membership),
)
