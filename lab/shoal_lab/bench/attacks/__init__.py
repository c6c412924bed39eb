"""Attacks on masked updates, one module each, from the literature; `registry` lists them.

- Each module names its source and the attacker: the broker, the aggregator, a device, or several together.
- An attack takes from `lab` only what its attacker would hold; masks and training are the fleet's own code.
- It reports its success beside that of guessing, in the same unit (`base.Result`), for every mask mode.

`structure` has the attacks that run under both key lifetimes, a fresh key in each round as fleets have, and one key for the run
for comparison. `past` attacks the record of a whole fleet. `base` has the
measures, `lab` the task and data, `rounds` runs over several rounds, and `protocol` the checks that a device makes before it
uses a model.

Example: `known_pair` compares one vector in clear and masked, finds the permutation, and opens other updates with it.
"""
