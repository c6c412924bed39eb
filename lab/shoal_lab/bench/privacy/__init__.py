"""The privacy benchmark: cost and exactness of each mask mode, and the success of each attack on it.

- `cost` measures masking and sealing, and the similarities and means that the aggregator computes under a mask.
- `benchmark` runs every attack of `shoal_lab.bench.attacks.registry` on every mode, on one thread with fixed seeds.
- `table` prints the report as text, `page` as one HTML file without external resources.

Example: ``shoal bench privacy --quick`` prints attacks down and modes across, with a star where an attack works.
"""
