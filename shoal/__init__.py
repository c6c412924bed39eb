"""Shoal: clustered federated learning whose server averages updates that it cannot read.

This package holds everything that the parties share, the owner's program (`shoal-fleet`) and the researchers' program
(`shoal`). The two other programs have packages of their own: `edge_client` (`shoal-edge`) and `aggregator`
(`shoal-aggregator`). The cryptography is in `crypto`.

- A device masks its update with a secret orthonormal map. Norms and dot products survive, so the aggregator can cluster
  and average, but it never holds the map.
- The owner signs a run plan; devices refuse any announcement that the plan does not allow.
- Imports point downwards only: errors, limits and types; util; protocol; transport; membership and task; owner;
  simulation; experiments, demo and bench; cli. `lint-imports` checks this.

A run in three steps: ``shoal-fleet run`` writes a signed run file, ``shoal-aggregator serve`` announces its rounds, and
each ``shoal-edge run`` downloads the models, trains and uploads a masked update. ``shoal demo`` does all of it on one
machine.
"""
