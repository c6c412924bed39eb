"""Input images by gradient matching: change an image until its gradient matches the observed one.

Zhu et al., "Deep Leakage from Gradients" (2019), with L-BFGS; Geiping et al., "Inverting Gradients" (2020) for the Adam variant
on a convolutional network. Some variants account for the mask: a permutation preserves the sorted values, signs preserve the
sorted absolute values, and every mask preserves the norm, so these are matched instead.
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
from shoal.types import Float32Vector
from shoal_lab.bench.attacks.base import DB_MARGIN, Attack, Picture, Result, psnr_db
from shoal_lab.bench.attacks.lab import CLASSES, LR, Images, Lab

WHO: Final = "aggregator with the clear model, the image's label and a one-image, one-step update"
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


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the mean PSNR of each variant on the MLP and, unless quick, of plain matching on a CNN.

    It starts from the label's mean image, and on the MLP from noise as well. The result that fits better counts, which the
    attacker can determine without the truth.
    """
    images = lab.pick("gradient matching", lab.trials(3, 2))
    guesses = [psnr_db(lab.public.mean(int(y)), x) for x, y in zip(images.x, images.y, strict=True)]
    seen = [lab.masked(lab.gradient(images.rows(np.array([i]))), mode) for i in range(len(images))]
    flat = (lab.side**2,)
    results = [_result(lab, f"{view}, MLP", lab.module(), seen, images, flat, view, guesses) for view in VIEWS]
    if not lab.quick:
        model = _cnn(lab)
        picked = images.rows(np.arange(2))
        seen = [_masked_gradient(lab, mode, model, picked.rows(np.array([i]))) for i in range(2)]
        results.append(_result(lab, "DLG, CNN", model, seen, picked, (1, lab.side, lab.side), "DLG", guesses[:2]))
    return results


def _result(
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
    square = (lab.side, lab.side)
    return Result(
        name=name,
        attacker=WHO,
        success=float(np.mean([psnr_db(a, b) for a, b in zip(found, images.x, strict=True)])),
        chance=float(np.mean(guesses)),
        unit="dB",
        margin=DB_MARGIN,
        note="PSNR; chance shows the mean image of the label",
        pictures=(Picture("true", images.x[0].reshape(square)), Picture(name, found[0].reshape(square))),
    )


def _cnn(lab: Lab) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build("cnn", side=lab.side, filters1=8, filters2=16, hidden=32, classes=CLASSES, kernel=3).model


def _masked_gradient(lab: Lab, mode: str, model: nn.Module, image: Images) -> Float32Vector:
    x = torch.from_numpy(image.x).reshape(1, 1, lab.side, lab.side)
    step = gradient_of(model, x, torch.from_numpy(image.y), differentiable=False).numpy() * np.float32(-LR)
    return mask(step, lab.derive(mode, step.size)).values / np.float32(-LR)


ATTACK: Final = Attack("gradient matching", "Zhu et al. 2019 (DLG); Geiping et al. 2020", WHO, run)
