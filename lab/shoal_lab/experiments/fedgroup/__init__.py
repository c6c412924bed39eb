"""Experiments of Duan et al., "FedGroup", that are programs of their own, and the placement of late devices.

- `heterogeneity` runs the paper's Table I.
- `newcomers` compares how CFL and FedGroup place devices that join later. Neither paper has figures for it.

Example: ``shoal simulate newcomers`` runs `newcomers`.
"""
