"""Draw a run's origins, its secret starting models, with torch's own initialisers.

The aggregator must not know an origin, and torch seeds its CPU generator with 32 bits, few enough to try them all. So the
uniform and normal draws of the initialisers come from a numpy generator with 256 bits of seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import TaskError
from shoal.owner.task_compiler.builtin import TaskSource, build, user_factory
from shoal.owner.task_compiler.compile import layout
from shoal.owner.task_compiler.flat import flatten
from shoal.task.manifest import PRIVATE, Parameter, TaskManifest

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SEED_BYTES: Final = 32
_aten = torch.ops.aten


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Answers in-place uniform and normal draws from a numpy generator; everything else is torch's."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws: dict[Any, Callable[..., Any]] = {
            _aten.uniform_.default: rng.uniform,
            _aten.normal_.default: rng.normal,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw = self._draws.get(func)
        if draw is None:
            return func(*args, **(kwargs or {}))
        tensor, first, second = (*args, 0.0, 1.0)[:3] if len(args) == 1 else (*args, 1.0)[:3]
        return tensor.copy_(torch.as_tensor(draw(first, second, tuple(tensor.shape))).to(tensor.dtype))


def make_origins(
    source: str | Callable[[], TaskSource],
    count: int,
    seed: int | None,
    *,
    manifest: TaskManifest | None = None,
    **options: int | bool,
) -> NDArray[np.float32]:
    """Return ``count`` independent initialisations, shape (count, d), float32, in the bundle's order.

    Private parameters are left out: the task has their initial values.

    Args:
        source: a built-in's name, ``file.py:function``, or a function that makes the task afresh.
        count: how many, at least 1.
        seed: makes the result repeatable on one installation; None draws from the operating system. Never pass a plan's
            seed: the aggregator reads plans.
        manifest: the compiled task, whose layout is checked and used. Without it the module's own order is used, which
            is the bundle's order if no parameters are shared.
        options: sizes for a built-in.

    Raises:
        TaskError: the source does not fit the manifest, or makes values that are not finite.
    """
    factory = _factory(source, options)
    return draw_origins(lambda: factory().model, count, seed, manifest=manifest)


def draw_origins(
    make: Callable[[], nn.Module], count: int, seed: int | None, *, manifest: TaskManifest | None = None
) -> NDArray[np.float32]:
    """Return ``count`` independent initialisations of the module that ``make`` returns: see `make_origins`."""
    if count < 1:
        raise TaskError(f"at least one origin is needed, not {count}")
    entropy = int.from_bytes(os.urandom(_SEED_BYTES), "little") if seed is None else seed
    vectors = [_draw(make, manifest, child) for child in np.random.SeedSequence(entropy).spawn(count)]
    origins = np.stack(vectors)
    if not np.isfinite(origins).all():
        raise TaskError("the model's initial values are not finite")
    return origins


def _factory(source: str | Callable[[], TaskSource], options: dict[str, int | bool]) -> Callable[[], TaskSource]:
    if callable(source):
        return source
    if ":" in source:
        return user_factory(source)
    return lambda: build(source, **options)


def _draw(
    make: Callable[[], nn.Module], manifest: TaskManifest | None, seed: np.random.SeedSequence
) -> NDArray[np.float32]:
    fallback = int(seed.generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=[]):
        # For random functions that `_Draws` does not answer, such as permutations.
        torch.manual_seed(fallback)
        with _Draws(np.random.default_rng(seed)):
            model = make()
        order = _order(layout(model), manifest)
        vector: NDArray[np.float32] = flatten(model, [p for p in order if p.segment != PRIVATE]).numpy()
    return vector


def _order(own: Sequence[Parameter], manifest: TaskManifest | None) -> Sequence[Parameter]:
    if manifest is None:
        return own
    if {(p.name, p.shape) for p in own} != {(p.name, p.shape) for p in manifest.parameters}:
        raise TaskError(
            "the source's parameters are not the compiled task's",
            hint="give the source and options it was compiled from",
        )
    return manifest.parameters
