"""Signing a run: options to run plan, checks against the roster, and the run file.

- The strategy checks its own settings (`draft_plan`) before a run number is used.
- `checks` refuses a run that cannot change any model, and warns about one that may not find clusters.
- The plan is signed and readable by the aggregator; task and origins are sealed to the devices.
- Origins never depend on the plan's seed, which the aggregator knows.

Example: `draft_plan` validates `Recipe`, `make_plan` takes a run number, and `write_run` seals task and
origins under the content key of the run's round 0 and writes ``runs/000001.run``. `algorithms` prints the settings of each
algorithm.
"""
