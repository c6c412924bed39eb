"""Shoal's simulator against plain torch, pfl-research and Flower on the same work, `shoal bench race`.

- `tasks` defines the work and writes it to a file: data, starting models and recipes, which all systems read.
- `systems` has one program for each system. It runs in a process of its own, in an environment of its own for pfl-research and
  Flower, and trains a round on request, so that the systems take turns and other load on the machine slows all alike.
- `benchmark` starts the programs, lets them take turns (`tasks.Turns`), measures and compares. It makes the peers' environments
  below the cache folder, if asked.

The programs import nothing of Shoal but `tasks`, which needs numpy alone; only that of Shoal's own simulator does.

Example: ``shoal bench race --install --json`` prints CPU seconds a round of all four systems.
"""
