"""Experiments of Sattler et al., "Clustered Federated Learning", that are programs of their own.

- `gap` measures the quantities of the paper's theory: separation gap, relative noise, norms.
- `toys` runs CFL on points in the plane.

Example: ``shoal simulate cfl-toys`` runs `toys`.
"""
