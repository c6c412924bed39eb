"""``shoal demo``: a broker, an aggregator and twenty devices as real processes on this machine.

- The devices belong to four hidden groups; no program of the fleet receives the groups.
- FedAvg, CFL and IFCA run one after the other, and the report compares their accuracy and clusters with the truth.
- Everything runs in one directory on loopback, and every process that was started is ended.

`runner` runs the demo, `data` makes the devices' files, `seen` compares a stored masked update with the true one, and
`report` prints progress and results.

Example: ``shoal demo --skew rotation`` hides groups of rotated images instead of swapped labels.
"""
