"""Sums that open without their terms: fixed-point vectors modulo 2^32, each hidden by a one-time pad.

    device       q = fixed(v, unit)        words = q + pad                     mod 2^32
    keeper       the sum of the pads of a cell, at least three devices
    aggregator   sum(words) - sum(pads) = sum(q)                                the mean is unit * sum(q) / n

- A pad is the ChaCha20 keystream of a seed of 32 random bytes, which a device draws for one upload and seals to the keeper. The
  aggregator never has a seed, and the keeper never has a word of an update.
- The unit follows from the signed plan (`unit_of`), so that all parties count in the same steps, and the sum of as many updates
  as the plan allows stays within 31 bits.
- Numbers of 16 bits take half the bytes (`ring.short`). The aggregator announces their unit for a round, by the longest update of
  the round before; the first round has 32 bits. The unit is in the share that a device seals to the keeper, in the key of its
  codes and beside each sum: all updates of a sum have the same. The sign of a sum of 16 bits is extended (`ring.extended`).
- A wrong pad, or a device that lies about its seed, makes the whole sum noise: `ring.mean_of` refuses a mean that is longer than
  any mean of updates within the plan's norm limit can be.

Example: two devices, and the sum that neither of them shows.

    >>> import numpy as np
    >>> from crypto.sums.ring import add_pad, hidden, mean_of, unit_of
    >>> unit = unit_of(norm_limit=1.0, length=4, most=2)
    >>> seeds = [bytes([n]) * 32 for n in (1, 2)]
    >>> updates = [np.array([0.5, 0, 0, 0.25], np.float32), np.array([0.5, 0, -0.5, 0], np.float32)]
    >>> total = sum(hidden(v, unit, 2, [seed]) for v, seed in zip(updates, seeds))
    >>> pads = np.zeros(4, np.uint32)
    >>> for seed in seeds:
    ...     add_pad(pads, seed)
    >>> mean_of(total - pads, 2, unit, 1.0).round(6).tolist()
    [0.5, 0.0, -0.25, 0.125]
"""
