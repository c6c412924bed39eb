"""The federated algorithms, with one interface on masked updates (`base.Strategy`).

- States are values: a method returns a new state and leaves its argument alone. No clock, socket, disk or random source.
- Updates are summed in order of device name, so that a replayed round gives the same bits.
- Strategies work on masked updates and need no clear model; draws follow from the run's seed.

`fedavg`, `local`, `one_shot` and `fesem` are modules; `cfl`, `ifca` and `fedgroup` packages; `registry` lists
them by name, and `discrepancy` measures how far devices drift, and `statistics` puts a round of statistics before any of them.

A round: ``plan`` names models and gives each device an assignment; ``close`` takes the `ClientUpdate`s,
moves the models and returns an `Outcome`. ``final`` plans the last round, in which each device evaluates the model it ends with.
"""
