"""The secret orthonormal mask of updates. Devices and the owner only: no server code may import this package.

- A mask is linear and keeps norms and dot products: the mean of masked updates is the masked mean.
- It follows from a secret and a context (fleet, run, key version, round, task, mode, segments) by HKDF-SHA256 alone, so that
  every device of a fleet derives the same mask on every platform.
- A masked vector names its mask by a key id. Unmasking under another key raises `KeyMismatchError`.
- Secrets move forward only: `RunChain.take` steps a run's chain on, and no round before follows from it.

`derivation` derives masks, `schedule` the secrets of runs and rounds, `masking` applies masks, `secret` is the secret,
`modes` the kinds of masks, `dense` the matrix before the mask of statistics, `kdf` and `stream` their primitives. Mode
``rotation`` takes its transform from `crypto.mask.hadamard`.

Example: mask a vector and unmask it again.

    >>> import numpy as np
    >>> from crypto.mask.derivation import MaskContext, derive
    >>> from crypto.mask.masking import mask, unmask
    >>> from crypto.mask.secret import MaskSecret
    >>> from shoal.types import Segment
    >>> context = MaskContext(
    ...     fleet="reef",
    ...     run_id=b"run-1",
    ...     task_digest=bytes(32),
    ...     mode="permutation",
    ...     segments=(Segment("cluster", 4),),
    ... )
    >>> key = derive(MaskSecret.generate(), context)
    >>> vector = np.array([1, 2, 3, 4], np.float32)
    >>> sorted(mask(vector, key).values.tolist()), unmask(mask(vector, key), key).tolist()
    ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
"""
