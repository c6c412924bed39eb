"""`shoal bench privacy`: what each mask mode costs, what the aggregator can compute under it, and which attacks succeed.

- `cost` measures masking and sealing, and the similarities and means that the aggregator computes under a mask.
- `benchmark` runs every attack of `shoal_lab.bench.attacks.registry` on every mode, on one thread with fixed seeds, and prints
  attacks down and modes across; `page` writes one HTML file without external resources.

Example: ``shoal bench privacy --quick`` prints a star where an attack works.
"""
