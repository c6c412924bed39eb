"""Vectors that are not here: each worker of a sharded aggregator holds some coordinates of them.

A `PartedVector` says how a vector follows from the round's updates. Strategies calculate with it as with an array: sums,
differences, multiples, slices and weighted means. All of these work on each coordinate by itself, so a worker carries them out
on its own coordinates, with the bits that one process would get. Products and norms are sums over all coordinates: the workers'
partial sums are added up, and only those come here (`VectorSpace`).

Example: `mean_of([a, b], weights)` of two updates is a description of some 100 bytes; its ``norm()`` asks the workers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError
from shoal.protocol.jobs import MeanPlace, NodeKind

MOST_GRAM_BYTES: Final = 256 << 20
"""Largest matrix of products, float64, that is ever whole: that of MOST_COMPARED vectors."""
MOST_COMPARED: Final = math.isqrt(MOST_GRAM_BYTES // 8)
"""Most vectors whose products with each other are whole at a time: 5,792."""
LEAST_EXPONENT: Final = -126
MOST_EXPONENT: Final = 127
"""Powers of two that float32 holds without loss."""


class VectorSpace(Protocol):
    """The workers, as the numerics see them. Each call waits for all of them."""

    def gram(self, vectors: Any, *, precise: bool = False) -> NDArray[np.float64]:
        """Return the products of n vectors with each other, (n, n), symmetric; ``precise`` forms them in float64."""

    def products(self, vectors: Any, others: Any) -> NDArray[np.float64]:
        """Return the products of n vectors with k others, (n, k)."""

    def squared_norms(self, vectors: Sequence[PartedVector]) -> NDArray[np.float64]:
        """Return the squared norms of n vectors, (n,)."""

    def means(
        self, vectors: Sequence[PartedVector], places: Sequence[MeanPlace], round_: int
    ) -> list[tuple[bytes, ...]]:
        """Have the parts of the vectors stored as means of a round; return the parts' digests of each, by worker."""


@dataclass(frozen=True, slots=True, eq=False)
class PartedVector:
    """A vector of float32, by the calculation that makes it.

    Attributes:
        space: the workers that hold its coordinates.
        size: its coordinates.
        kind, items, weights: the last step of the calculation, see `shoal.protocol.jobs.VectorNode`; items are vectors.
        device: of an UPDATE; digests: SHA-256 of its parts, in the order of the workers.
        bounds: first, last and step of a SLICE.
    """

    space: VectorSpace = field(repr=False)
    size: int
    kind: NodeKind
    items: tuple[PartedVector, ...] = ()
    weights: tuple[float, ...] = ()
    device: str = ""
    digests: tuple[bytes, ...] = ()
    bounds: tuple[int, int, int] = (0, 0, 1)

    # numpy must leave products and sums with its numbers to this class.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int]:
        """(size,)."""
        return (self.size,)

    @property
    def ndim(self) -> int:
        """1."""
        return 1

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """float32."""
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.size

    def __array__(self, *_: Any, **__: Any) -> NDArray[np.float32]:
        raise NumericsError("the algorithm takes updates as arrays, which an aggregator with workers does not have")

    def __add__(self, other: PartedVector) -> PartedVector:
        return self._made(NodeKind.SUM, other)

    def __sub__(self, other: PartedVector) -> PartedVector:
        return self._made(NodeKind.DIFFERENCE, other)

    def __mul__(self, factor: np.float32) -> PartedVector:
        return PartedVector(self.space, self.size, NodeKind.TIMES, (self,), (_float32(factor),))

    def __truediv__(self, divisor: np.float32) -> PartedVector:
        return PartedVector(self.space, self.size, NodeKind.OVER, (self,), (_float32(divisor),))

    def __getitem__(self, span: slice) -> PartedVector:
        start, stop, step = span.indices(self.size)
        if self.kind is NodeKind.SLICE or step < 1:
            raise NumericsError("a slice of a slice of a vector in parts")
        size = len(range(start, stop, step))
        return PartedVector(self.space, size, NodeKind.SLICE, (self,), bounds=(start, stop, step))

    def copy(self) -> PartedVector:
        """Return the vector: it never changes."""
        return self

    def norm(self) -> float:
        """Return the l2 norm, in float64."""
        return float(np.sqrt(self.space.squared_norms([self])[0]))

    def scaled_to_one(self) -> PartedVector:
        """Return a multiple of the vector by a power of two whose norm is about 1; a zero vector as it is."""
        norm = self.norm()
        if not np.isfinite(norm):
            raise NumericsError("updates hold NaN or infinities")
        if norm == 0.0:
            return self
        exponent = min(max(-int(np.frexp(norm)[1]), LEAST_EXPONENT), MOST_EXPONENT)
        return self * np.float32(np.ldexp(1.0, exponent))

    def _made(self, kind: NodeKind, other: PartedVector) -> PartedVector:
        if not isinstance(other, PartedVector) or other.size != self.size:
            raise NumericsError(f"a vector of {self.size} coordinates in parts, and {type(other).__name__}")
        return PartedVector(self.space, self.size, kind, (self, other))


def is_parted(vectors: Any) -> TypeGuard[Sequence[PartedVector]]:
    """Return whether these are vectors in parts."""
    return not isinstance(vectors, np.ndarray) and len(vectors) > 0 and isinstance(vectors[0], PartedVector)


def mean_of(vectors: Sequence[PartedVector], weights: NDArray[np.float64]) -> PartedVector:
    """Return the weighted mean that `aggregator.numerics.averaging.weighted_mean` forms of arrays."""
    first = vectors[0]
    numbers = tuple(float(weight) for weight in weights)
    return PartedVector(first.space, first.size, NodeKind.MEAN, tuple(vectors), numbers)


def wide_mean_of(vectors: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean of vectors (d,), float32, summed in float64 in the order given and rounded once to float32."""
    if is_parted(vectors):
        first = vectors[0]
        return PartedVector(first.space, first.size, NodeKind.WIDE_MEAN, tuple(vectors), tuple(map(float, weights)))
    total = sum(vector.astype(np.float64) * weight for vector, weight in zip(vectors, weights, strict=True))
    return np.asarray(total / sum(weights), np.float32)


def plain_mean_of(vectors: Sequence[Any], count: int) -> Any:
    """Return the sum of vectors (d,), float32, in the order given, over ``count``; all in float32."""
    return functools.reduce(operator.add, vectors) / np.float32(count)


def check_gram_size(count: int) -> None:
    """Check that the products of ``count`` vectors with each other may be whole.

    Raises:
        NumericsError: they take more than MOST_GRAM_BYTES.
    """
    if count > MOST_COMPARED:
        raise NumericsError(f"the products of {count} updates take more than {MOST_GRAM_BYTES} bytes")


def _float32(number: float | np.float32) -> float:
    return float(np.float32(number))
