"""Studies as tables: the TOML files of the papers', and what runs them.

- `run` deals a table's data, simulates an algorithm and forms the result; `tasks` makes data and networks.
- `watch` has what a table can measure; `alone` trains each device by itself.

Example: ``shoal simulate cfl-label-swap`` runs a table of cfl.toml.
"""
