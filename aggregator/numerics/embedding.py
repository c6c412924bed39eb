"""FedGroup's two dissimilarity measures of updates, EDC and MADC, both from one Gram matrix (fedgroup Eqs 7, 8).

EDC compares the updates in the m top singular directions of dW^T. With G = dW dW^T = U L U^T, direction j is
dW^T u_j / sqrt(l_j), so its cosine with update i is u_ij sqrt(l_j) / sqrt(G_ii), which needs the Gram matrix and no
vector of length d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, NumpyBackend, gram_flops
from aggregator.numerics.backend import gram as gram_of
from aggregator.numerics.checks import NumericsError, check_square
from aggregator.numerics.parted import is_parted
from aggregator.numerics.rows import Updates, check_rows

PRECISE_FLOPS: Final = 4e9
"""Work (``gram_flops``) up to which EDC uses float64 products: at most 0.1 s on one core, the usual size of a cold start."""


@dataclass(frozen=True, slots=True)
class Directions:
    """The m top singular directions of n updates, as combinations of these updates.

    Attributes:
        coefficients: shape (n, m), float64: direction j is the sum over i of ``coefficients[i, j]`` times update i and
            has length 1; a column of zeros where the updates span fewer than m directions.
        singular_values: shape (m,), float64, descending: the l2 norm of all updates' components along each direction.
    """

    coefficients: NDArray[np.float64]
    singular_values: NDArray[np.float64]


def edc(updates: Updates, directions: int, *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return the cosine of every update to each of the top singular directions (fedgroup Eq. 8, Alg. 3 lines 12, 13).

    Args:
        updates: shape (n, d), float32, finite, n at least 2.
        directions: m, from 1 to n.
        backend: numpy by default, with float64 products up to ``PRECISE_FLOPS``; on CUDA with float64 products always.

    Returns:
        shape (n, directions), float64, in [-1, 1]; see ``edc_from_gram``.

    Raises:
        NumericsError: the arguments do not fit the above.
    """
    count, length = check_rows(updates, least=2)
    small = backend is None and gram_flops(count, length) <= PRECISE_FLOPS
    precise = is_parted(updates) or small or (backend is not None and backend.name.startswith("torch:cuda"))
    return edc_from_gram(gram_of(updates, backend=backend, precise=precise), directions)


def edc_from_gram(gram: NDArray[np.float64], directions: int) -> NDArray[np.float64]:
    """Return ``edc`` of the updates with the dot products ``gram``.

    Distances do not depend on a direction's sign; here its largest coefficient is positive. A zero update has a row of
    zeros, and a direction that the updates do not span has a column of zeros.

    Args:
        gram: shape (n, n), float64, symmetric, finite.
        directions: m, from 1 to n.

    Returns:
        shape (n, directions), float64, in [-1, 1].

    Raises:
        NumericsError: the arguments do not fit the above.
    """
    found = top_directions(gram, directions)
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    # G times (u / s) is u s, without a division by a vanishing s.
    shadows = found.coefficients * found.singular_values**2
    rows = np.divide(shadows, lengths[:, None], out=np.zeros_like(shadows), where=lengths[:, None] > 0)
    clipped: NDArray[np.float64] = np.clip(rows, -1.0, 1.0)
    return clipped


def top_directions(gram: NDArray[np.float64], directions: int) -> Directions:
    """Return the top singular directions of the updates with the dot products ``gram`` (fedgroup Eq. 8, V).

    Args:
        gram: shape (n, n), float64, symmetric, finite.
        directions: m, from 1 to n.

    Raises:
        NumericsError: the arguments do not fit the above.
    """
    matrix = check_square(gram, "the Gram matrix", least=1)
    size = len(matrix)
    if not 1 <= directions <= size:
        raise NumericsError(f"{directions} directions of {size} updates; from 1 to {size} can be had")
    scale = float(np.abs(np.diagonal(matrix)).max())
    if scale == 0:
        return Directions(np.zeros((size, directions)), np.zeros(directions))
    values, vectors = np.linalg.eigh(matrix / scale)
    # eigh sorts the eigenvalues in ascending order.
    top = values[::-1][:directions]
    vectors = vectors[:, ::-1][:, :directions]
    # Smaller eigenvalues are rounding errors: the updates do not span these directions.
    spanned = top > size * np.finfo(np.float64).eps * top[0]
    singular = np.sqrt(np.where(spanned, top, 0.0)) * np.sqrt(scale)
    peaks = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None, :], axis=0)
    signed = vectors * np.where(peaks < 0, -1.0, 1.0)
    coefficients = np.divide(signed, singular, out=np.zeros_like(signed), where=spanned)
    return Directions(coefficients, singular)


def madc(similarity: NDArray[np.float64], *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return the mean absolute difference of pairwise cosines (fedgroup Eq. 7).

    The sum over all z is the city-block distance of two rows, less the two terms z = i and z = j.

    Args:
        similarity: shape (n, n), float64, symmetric to 1e-9, finite, n at least 3: cosines.
        backend: numpy by default.

    Returns:
        shape (n, n), float64, exactly symmetric, not negative, zeros on the diagonal.

    Raises:
        NumericsError: ``similarity`` is not as above.
        ConfigError: scipy is not installed.
    """
    matrix = check_square(similarity, "the similarity", least=3)
    total = (backend or NumpyBackend()).city_block(matrix)
    own = np.diagonal(matrix)
    # |S(i,i) - S(j,i)| and |S(i,j) - S(j,j)|: each is the other's transpose.
    to_self = np.abs(own[:, None] - matrix.T)
    total -= to_self + to_self.T
    np.maximum(total, 0.0, out=total)
    total /= len(matrix) - 2
    return total
