"""One program for each system of the race: ``python -m shoal.bench.race.systems.NAME FILE TASK ROUNDS``.

Each loads the task's file, trains a round whenever `shoal.bench.race.turns.Turns` lets it begin, and has the same model, step
size, batch size and number of epochs. All reshuffle a device's samples for every epoch but pfl-research, which visits them in
their order.

Example: `plain` is local training as a tutorial of torch has it, and the mean of all models.
"""
