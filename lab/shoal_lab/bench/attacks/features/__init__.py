"""Attacks on the statistics of features that devices send before the first round of training.

- The attacker is the aggregator alone, with the vectors of one round.
- `reading` has the attacks: blocks of a rotation, integer relations, and the most plausible figures with a given Gram matrix.
- `rows` runs each on vectors under the mask alone, where it succeeds, and on vectors as fleets send them.

Example: under a rotation alone ``reading.blocks`` reads the means of eight features from the vectors of twenty devices.
"""
