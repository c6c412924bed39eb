"""Load on the aggregator: CPU time, memory and rounds with many devices.

- `fleet_load` runs the real programs through mosquitto; `measurement` measures a run of them, and `soak` one of many minutes.
- Devices are real runtimes in a few processes (`driver`), with training replaced by a cheap gradient; with ``--prepared``
  one process replays uploads that were sealed beforehand (`replay`).
- `table` makes the table of deploy/README.md from the results in results/.

Example: ``shoal bench load --devices 200`` runs rounds of 200 devices through mosquitto and ``shoal-aggregator serve``.
"""
