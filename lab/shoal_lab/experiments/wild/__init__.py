"""The experiment ``wild``: the strategies on fleets whose devices differ as real ones do, with one default setting for all.

- fleets.toml describes the fleets and `scenarios` reads it; `images` and `tables` make their data.
- `runs` runs a strategy and measures every device.
- Nothing but the data depends on the scenario, except the number of groups for strategies that can't find it.
- `page` writes the tables of docs/wild-fleets.md from the kept results.

Example: ``shoal simulate wild --scenario table-wine --strategy all`` needs no data files.
"""
