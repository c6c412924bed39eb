"""`shoal.simulate` and its result: a run of a strategy on partitions of data, in this process.

- `simulate` checks all arguments before it trains; bad input raises an error of `shoal.errors` with a hint.
- A model with the layers of a network of `shoal.simulation.trainers` is trained by the vectorised trainers; any other torch
  module by autograd, device by device.
- Defaults are those of a fleet: `shoal.owner.runs.plan.Recipe` and `shoal.task.manifest.LocalTraining`.

Example: ``shoal.simulate(model, partitions, strategy="cfl").clusters`` is the cluster of each device after the last round.
"""
