"""Clustered federated learning (Sattler et al.): split a cluster where its devices' updates disagree.

- A cluster is split when its mean update has become small while single updates have not, into the two halves
  whose updates are least alike (`split`).
- By default both halves train for a few rounds and the split stands only if each prefers its own model
  (`split_validation`); a split that does not pay is reverted (`merge`), and devices may change clusters (`reassignment`).
- Split clusters form a tree with their models (`tree`); a late device walks down the tree: at each node it compares its
  update with those of both sides on its own side, and follows the nearer one (Alg. 4, `newcomers`).

`strategy` is the algorithm, `state` its settings and state.

Example: with two hidden groups, one cluster trains until its mean update is small, the candidate split is
validated, and two leaves train on from the common model.
"""
