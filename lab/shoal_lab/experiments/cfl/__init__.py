"""Experiments of Sattler et al., "Clustered Federated Learning".

- `gap`, `noise` and `congruence` measure the quantities of the paper's theory: separation gap, relative noise, norms.
- `labels`, `news` and `toys` run CFL itself on images, text and points in the plane, with FedAvg beside it.
- `watched` runs a strategy with every update available to the measurement, and `watch` records each round; neither
  changes the run. `networks` has the models of the image experiments.

Example: ``shoal simulate cfl-label-swap`` runs `labels.label_swap`.
"""
