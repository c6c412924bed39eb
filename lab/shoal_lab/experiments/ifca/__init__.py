"""The experiment of Ghosh et al. (IFCA) that is a program of its own.

- `synthetic` sweeps mixtures of linear models.
- `linear` runs many starts on one mixture at once for it.

Example: ``shoal simulate ifca-synthetic`` runs `synthetic`.
"""
