"""The simulator: one run of a strategy over a population of simulated devices.

- `simulate` plans a round with the strategy, lets `workforce` train and mask, screens norms as the aggregator does,
  and closes the round.
- Every random draw follows from the seed and the round's number, so a run resumed from a `checkpoint` gives the same bits.
- `evaluation` and `metrics` measure accuracy and clustering on clear models; the strategy never sees their results.

`records` holds a run's options and its rounds.

Example: two clusters that match the true groups except for one device.

    >>> from shoal.simulation.engine.metrics import purity
    >>> purity([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    0.8
"""
