"""`shoal bench privacy`: what each mask mode costs, what the aggregator can compute under it, and which attacks succeed.

- `benchmark` measures masking and sealing, and the similarities and means that the aggregator computes under a mask.
- It runs every attack on every mode, on one thread with fixed seeds, and prints attacks down and modes across, or writes one HTML
  file without external resources.

Example: ``shoal bench privacy --quick`` prints a star where an attack works.
"""
