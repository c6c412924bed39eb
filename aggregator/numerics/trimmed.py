"""Means of figures that devices report, which one false figure of five or more can't decide.

Trimming leaves out the smallest and the largest figure, whatever their weights are; winsorising replaces them by their
neighbours. So a false figure counts no more than one within the range of the others. Of fewer than five figures at most two would
be left, so they stay as they are: there one false figure decides.

Example: five margins, of which one is false.

    >>> import numpy as np
    >>> from aggregator.numerics.trimmed import inner, winsorised
    >>> margins = np.array([0.2, -5.0, 0.1, 0.3, 0.2])
    >>> float(margins[inner(margins)].mean().round(3)), winsorised(margins).tolist()
    (0.167, [0.2, 0.1, 0.1, 0.2, 0.2])
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

FEWEST_TRIMMED: Final = 5
"""Fewest figures of which the smallest and the largest are left out."""
FIGURE_STEP: Final = 1e-4
"""Unit to which devices round losses and margins; a spread below one unit can't be told from none."""


def inner(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the values (n,) stay: all but the smallest and the largest of five or more, shape (n,)."""
    kept = np.ones(len(values), bool)
    if len(values) >= FEWEST_TRIMMED:
        kept[np.argsort(values, kind="stable")[[0, -1]]] = False
    return kept


def winsorised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values (n,) with the smallest and the largest of five or more replaced by their neighbours."""
    if len(values) < FEWEST_TRIMMED:
        return values
    _, least, *_, most, _ = np.sort(values)
    return np.clip(values, least, most)
