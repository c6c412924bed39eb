"""Vectors on the wire: float32, or fewer bits a coordinate, as the run plan says. No keys, no messages, no I/O.

- `codec.encode` and `codec.decode` turn a float32 vector into bytes and back. A plan names one precision for the way up
  and one for the way down; a receiver refuses every other number of bytes.
- Rounding is deterministic: it follows from a public seed of the upload or the mean (`seeds`), so a restart makes the same
  bytes. Decoding needs no seed, and gives every receiver the same bits.
- `lengths` gives sizes without numpy, for programs that only check limits.

For d coordinates ``float32`` and ``float16`` take 4 d and 2 d bytes. ``int8`` (module `blocks`) takes d + 4 ceil(d / 256):
a scale for each 256 coordinates, and stochastic rounding.

Example: a vector in a quarter of its bytes.

    >>> import numpy as np
    >>> from shoal.protocol.precision.codec import decode, encode
    >>> vector = np.linspace(-1, 1, 1000, dtype=np.float32)
    >>> data = encode(vector, "int8", seed=b"upload 7")
    >>> len(data), bool(np.abs(decode(data, 1000, "int8") - vector).max() <= 1 / 127)
    (1016, True)
"""
