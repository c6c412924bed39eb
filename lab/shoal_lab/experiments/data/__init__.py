"""Data sets of the experiments: where they are found, how they are downloaded, and how they are split among devices.

- Nothing is downloaded unless ``shoal data fetch`` asks for it; the SHA-256 of every fetched file is checked.
- Splits depend on the seed alone, and report the true groups apart from the samples.

`datasets` finds and loads images, `download` fetches MNIST, `text` reads LEAF and AG-News, `splits` divides
samples among devices and draws Synthetic(alpha, beta), `cli` is ``shoal data``.

Example: ten samples cut 60/20/20 into training, validation and test.

    >>> import numpy as np
    >>> from shoal.simulation.shares import CFL_SHARES, cut
    >>> x, y = np.zeros((10, 2), np.float32), np.zeros(10, np.int64)
    >>> [len(shard) for shard in cut(x, y, np.arange(10), CFL_SHARES)]
    [6, 2, 2]
"""
