"""The fleet owner's side, program `shoal-fleet`: keys, enrolment, broker files, tasks and signed runs.

- The owner's directory stays on the owner's machine; it holds the owner's key and every secret of the fleet.
- Only the owner signs rosters and run plans. Other parties refuse those of any other key.
- One program at a time changes the directory (`FleetDirectory.changing`), and a change of several files is journalled.

`keys` is the directory and its files, `enrolment` admits devices through the broker, `broker` writes mosquitto's files,
`task_compiler` turns a torch model into a task, `runs` signs runs, and `cli` is the command line.

Example: ``init`` makes a fleet, ``add-aggregator`` and ``add-device`` (or ``token`` and ``approve``) fill its roster,
``task compile`` writes a signed task, and ``run`` signs a run of it.
"""
