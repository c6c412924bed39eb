"""Recurrent layers as loops of the graph: LSTM, GRU and RNN, several layers and two directions.

torch writes a recurrent layer out step by step. Here a layer is one scan over its steps that stores the states, and its gradient
one scan from the last step to the first, so that the graph has the same size for any number of steps. Everything that needs no
earlier state is computed for all steps at once, before and after the scans.

With gates ``a``, ``b`` (of input and state) of step t and weights W, c of the states, a layer is

    b_t = h_(t-1) W + c,   (h_t, ...) = cell(a_t, b_t, h_(t-1), ...)

which holds for each of the three kinds.

`Lowered` traces these and a few other functions of torch in a form of our own, since a graph can't have torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.func import vjp
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Cell = Callable[..., tuple[Tensor, ...]]
"""(gates of the input, gates of the state, h, ...) -> the next (h, ...), each (directions, n, hidden)."""


def _lstm(a: Tensor, b: Tensor, _h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    enter, forget, update, leave = (a + b).chunk(4, -1)
    cell = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(update)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _gru(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (reset, keep, update), (reset_b, keep_b, update_b) = a.chunk(3, -1), b.chunk(3, -1)
    new = torch.tanh(update + torch.sigmoid(reset + reset_b) * update_b)
    return (new + torch.sigmoid(keep + keep_b) * (h - new),)


CELLS: Final[Mapping[str, Cell]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda a, b, _h: (torch.tanh(a + b),),
    "rnn_relu": lambda a, b, _h: (torch.relu(a + b),),
}
"""By the name of torch's function."""


def _steps(rows: Tensor) -> Tensor:
    """Return a constant with a row of nothing for each step, from which a device reads how many steps a graph has."""
    return torch.tensor([[]] * len(rows), dtype=rows.dtype)


class _Scan(torch.autograd.Function):
    """A scan without a gradient: inside another function's gradient torch does not take a bare one."""

    @staticmethod
    def forward(step: Callable[..., Any], carried: int, scanned: int, *values: Tensor) -> tuple[Tensor, ...]:
        start, rows, fixed = values[:carried], values[carried : carried + scanned], values[carried + scanned :]
        return tuple(scan_op(step, list(start), list(rows), fixed))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Store nothing."""


class _Layer(torch.autograd.Function):
    """The states of a layer after each step."""

    @staticmethod
    def forward(cell: Cell, a: Tensor, weight: Tensor, bias: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        """Return each state after each step, (steps, directions, n, hidden).

        Shapes:
            a: shape (steps, directions, n, gates).
            weight: shape (directions, hidden, gates).
            bias: shape (directions, 1, gates).
            start: of each state, shape (directions, n, hidden).
        """
        count = len(start)

        def step(*values: Tensor) -> tuple[Tensor, ...]:
            states, gates, (w, c) = values[:count], values[count], values[-2:]
            new = cell(gates, states[0] @ w + c, *states)
            return (*new, *(state.clone() for state in new))

        return tuple(scan_op(step, list(start), [a, _steps(a)], (weight, bias))[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.cell, *values = inputs
        ctx.save_for_backward(*values, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grads)
        a, weight, bias, *states = ctx.saved_tensors
        before = [
            torch.cat([s.unsqueeze(0), each[:-1]]) for s, each in zip(states[:count], states[count:], strict=True)
        ]
        steps, directions, n, hidden = before[0].shape
        rows = before[0].transpose(0, 1).reshape(directions, steps * n, hidden)
        b = (rows @ weight + bias).reshape(directions, steps, n, -1).transpose(0, 1)

        def step(*values: Tensor) -> tuple[Tensor, ...]:
            later, own, w = values[:count], values[-count - 2 : -2], values[-1]
            pull: Any = vjp(ctx.cell, *values[count : 2 * count + 2])[1]
            grad_a, grad_b, *grad_states = pull(tuple(x + y for x, y in zip(later, own, strict=True)))
            grad_states[0] = grad_states[0] + grad_b @ w
            return (*grad_states, grad_a.clone(), grad_b.clone())

        turned = [value.flip(0) for value in (a, b, *before, *grads)]
        rest = (*turned, _steps(a), weight.transpose(1, 2))
        *grad_start, grad_a, grad_b = _Scan.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            step, count, len(rest) - 1, *map(torch.zeros_like, states[:count]), *rest
        )
        grad_a, grad_b = grad_a.flip(0), grad_b.flip(0)
        summed = grad_b.transpose(0, 1).reshape(directions, steps * n, -1)
        return None, grad_a, rows.transpose(1, 2) @ summed, summed.sum(1, keepdim=True), *grad_start


def is_plain(_x: Tensor, _start: Any, weights: Any, has_biases: bool, count: int, *rest: Any) -> bool:
    """Return whether `layers` knows arguments of torch's function: a padded sequence, and no projection of the states."""
    return isinstance(weights, list) and len(weights) == count * (2 if rest[2] else 1) * (4 if has_biases else 2)


def layers(
    cell: Cell,
    x: Tensor,
    start: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    count: int,
    _dropout: float,
    _training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what torch's function of ``cell`` returns: the last layer's outputs, and each state after the last step.

    Args:
        cell: one of CELLS.
        x: shape (steps, n, inputs), or (n, steps, inputs) if ``batch_first``.
        start: states before the first step, each (count * directions, n, hidden).
        weights: for each layer and direction: of the input (gates, inputs), of the state (gates, hidden), and both biases
            (gates,) if ``has_biases``.
        has_biases: whether there are biases.
        count: layers.
        bidirectional: whether a second direction reads x from its end.
        batch_first: see x.
    """
    begin = (start,) if isinstance(start, Tensor) else tuple(start)
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    rows = x.transpose(0, 1) if batch_first else x
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(count):
        first = layer * directions
        own = weights[first * each : (first + directions) * each]
        into, back, *biases = (torch.stack(list(own[i::each])) for i in range(each))
        bias_in, bias_back = (b.unsqueeze(1) for b in biases or [torch.zeros(back.shape[:2], dtype=x.dtype)] * 2)
        steps, n, inputs = rows.shape
        both = torch.stack([rows, rows.flip(0)][:directions]).reshape(directions, steps * n, inputs)
        gates = (both @ into.transpose(1, 2) + bias_in).reshape(directions, steps, n, -1).transpose(0, 1)
        states: tuple[Tensor, ...] = _Layer.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            cell, gates, back.transpose(1, 2), bias_back, *(s[first : first + directions] for s in begin)
        )
        ends.append(tuple(state[-1] for state in states))
        rows = torch.cat([states[0][:, 0], *(turned.flip(0) for turned in states[0][:, 1:].unbind(1))], -1)
    last = (torch.cat(state) for state in zip(*ends, strict=True))
    return (rows.transpose(0, 1) if batch_first else rows, *last)


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
