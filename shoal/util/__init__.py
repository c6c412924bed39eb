"""Helpers without secrets of their own: durable files, locks, configuration, console output, logging, memory and limits.

- `files` writes atomically and durably, and refuses private files that other users can read.
  It admits one program at a time to a directory; the kernel releases the lock if the program is killed.
- `config` layers flag, environment, TOML file and default, in this order, and rejects unknown keys.
- `console` prints data to stdout and everything else to stderr; ``--json`` prints exactly one object.
- `log_throttle` limits repeated warnings; `process` and `telemetry` tune the process.

Example: a time as logs print it.

    >>> from shoal.util.console import second
    >>> second(0)
    '1970-01-01T00:00:00Z'
"""
