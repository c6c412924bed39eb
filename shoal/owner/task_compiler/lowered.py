"""Functions of torch that are traced in another form than torch's own, which a graph can't have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoal.owner.task_compiler.recurrent import CELLS, Cell, is_plain, layers


class Lowered(TorchFunctionMode):
    """Inside the block linear layers are matrix products, and recurrent layers loops.

    Torch folds the batch of a linear layer with more than two axes into a number, and fixes it so, and that of a recurrent cell
    too; and it writes a recurrent layer out step by step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is functional.linear:
            return _linear(*args, **kwargs)
        if func in (functional.adaptive_max_pool1d, functional.adaptive_max_pool2d):
            return _adaptive_max(func, *args, **kwargs)
        if name in CELLS and is_plain(*args):
            return layers(CELLS[name], *args)
        if name.removesuffix("_cell") in CELLS and name.endswith("_cell"):
            return _cell(CELLS[name.removesuffix("_cell")], *args)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


def _cell(
    cell: Cell, x: Tensor, start: Any, into: Tensor, back: Tensor, bias_in: Tensor | None, bias_back: Tensor | None
) -> Any:
    """Return what torch's function of one step returns: the states of an LSTM, or the one state."""
    states = (start,) if isinstance(start, Tensor) else tuple(start)
    new = cell(_linear(x, into, bias_in), _linear(states[0], back, bias_back), *states)
    return new[0] if isinstance(start, Tensor) else new


def _adaptive_max(func: Any, x: Tensor, size: int | Sequence[int | None], return_indices: bool = False) -> Any:
    """Return a plain pool's result for equal windows, since that has a gradient; ``func`` has the other windows."""
    rank = 1 if func is functional.adaptive_max_pool1d else 2
    sizes = [*zip(x.shape[-rank:], [size] * rank if isinstance(size, int) else size, strict=True)]
    if any(width % (outputs or width) for width, outputs in sizes):
        return func(x, size, return_indices=return_indices)
    pool: Any = functional.max_pool1d if rank == 1 else functional.max_pool2d
    return pool(x, [width // (outputs or width) for width, outputs in sizes], return_indices=return_indices)
