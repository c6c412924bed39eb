"""Attacks on masked updates, from the literature, one subject a module; `shoal_lab.bench.privacy.benchmark` lists them.

- Each attack names its source and the attacker: the broker, the aggregator, a device, or several together.
- An attack takes from `lab` only what its attacker would hold; masks, training and a device's checks are the fleet's own code.
- It reports its success beside that of guessing, in the same unit (`base.Result`), for every mask mode.

`contents` reads what one update shows of the data, `places` and `structure` where masked coordinates belong, `invariants` what
norms and dot products tell, `features` the statistics of features. In `insiders` an aggregator departs from the protocol or a
device helps it, `broker` reads a fleet's traffic, and `past` its record with stolen secrets.

Example: `places.known_pair` compares one vector in clear and masked, finds the permutation, and opens other updates with it.
"""
