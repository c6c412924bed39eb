"""Fleets on one machine: a vectorised simulator, and fleets that run the real device and aggregator code.

- `engine` runs a strategy over thousands of simulated devices, without messages; `trainers` train them in batches.
- `process_fleet` starts the real programs with real files and a real broker.
- Both run the strategies of `aggregator.strategies` unchanged. True groups (`data.Population.groups`) are used for
  metrics only; no strategy receives them.

Example: ``simulate("fedavg", {}, population, network, sim_options(rounds=10))`` returns a
`SimResult` with ten rounds in its history.
"""
