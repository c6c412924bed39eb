"""The experiment of Ghosh et al. (IFCA) that is a program of its own.

- `synthetic` sweeps mixtures of linear models.
- All starts of a trial run at once on one mixture.

Example: ``shoal simulate ifca-synthetic`` runs `synthetic`.
"""
