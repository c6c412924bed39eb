"""FedGroup and FedGrouProx (Duan et al.): groups from a cold start, then FedAvg within each group.

- In the cold start some devices train alone from the origin; their updates are clustered by EDC or MADC (`strategy`).
- A late device trains the origin, compares its update with the groups' directions on its own side (Eq. 9), and joins the
  nearest group.
- With ``eta_g`` above 0 groups also exchange models (inter-group aggregation). FedGrouProx adds FedProx's term.

`strategy` is the algorithm, `state` its settings and its state.

Example: with ``groups=3`` and ``alpha=20``, 60 devices pre-train in the first round, three groups result, and each round
after that averages within the groups.
"""
