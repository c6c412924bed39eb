"""Similarity, clustering and averaging of masked updates, in numpy, or in torch on a GPU.

- Rows are updates, shape (n, d), float32. Masks keep dot products, so results on masked rows are those on clear rows.
- A mean adds its rows in the given order and gives the same bits on every backend, and after a restart.
- Arrays with a wrong shape or dtype, or with NaN or infinities, raise `NumericsError`.

`bipartition`, `clustering` and `embedding` group devices, `gap` measures a split, `averaging` forms means, `robust` weighs
updates against false ones, and `backend` computes dot products and cosines where they are fastest.

Example: four updates in two directions.

    >>> import numpy as np
    >>> from aggregator.numerics.bipartition import bipartition
    >>> from aggregator.numerics.backend import cosine_matrix
    >>> updates = np.array([[1, 0], [0, 1], [2, 0.1], [0.1, 3]], np.float32)
    >>> halves = bipartition(cosine_matrix(updates))
    >>> halves.left, halves.right
    ((0, 2), (1, 3))
"""
