"""Load on the aggregator: CPU time, memory and rounds with many devices.

- `aggregator` drives the service without a network, `engine` the engine alone, `fleet_load` the real programs through
  mosquitto, and `soak` runs the latter for many minutes.
- Devices are real runtimes in a few processes (`driver`), with training replaced by a cheap gradient; with ``--prepared``
  one process replays uploads that were sealed beforehand (`replay`).
- `table` makes the table of deploy/README.md from the results in results/.

Example: ``shoal bench load --devices 200`` runs rounds of 200 devices through mosquitto and ``shoal-aggregator serve``.
"""
