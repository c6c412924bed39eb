"""IFCA (Ghosh et al.): k models; each device trains the one with the least loss on its data.

- Devices choose; the aggregator averages, for each model, the updates of those that chose it.
- Several random starts may run for a few rounds each; the one with the least training loss is chosen.
- Once choices are stable, devices are sent only their own model, with a full broadcast now and then (`broadcast`).

`strategy` is the algorithm, `state` its settings and state.

Example: with k = 2, an assignment names both models; an upload names the model that the device chose and trained; the two
means move the two models.
"""
