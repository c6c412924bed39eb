"""The programs of the race, one for each system.

- A program gets the task's file, the task's name and the number of rounds, and trains a round whenever
  `shoal_lab.bench.race.tasks.Turns` lets it begin.
- All have the same starting model, step size, batch size and number of epochs. They reshuffle a device's samples for every
  epoch, but pfl-research visits them in their order.
- Only the program of Shoal's simulator imports the simulator; those of the peers run in environments without it.

Example: `plain` is local training as a tutorial of torch has it, and the mean of all models.
"""
