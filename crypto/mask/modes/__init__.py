"""The kinds of masks: ``none``, ``permutation``, ``signed-permutation`` and ``rotation``.

- A mode builds one orthonormal transform for each segment from derived subkeys (`base.Mode`, `base.Transform`).
- An exact mode only moves coordinates and flips signs, so that unmasking restores the same bits. ``rotation`` mixes
  coordinates and restores them to a relative l2 error of 1e-6.
- A new mode is a module here and a line in `registry`.

Example: the modes that restore the same bits.

    >>> from crypto.mask.modes.registry import find
    >>> find("permutation").exact, find("rotation").exact
    (True, False)
"""
