"""The state of the fleet: one frozen record, which `status` prints as text and as JSON.

    facts.py       facts known to the daemon alone: connection, presences, the open round; `LiveFacts`
    watch.py       the recorders of these facts inside the daemon
    live_file.py   the small file ``live.json`` through which the daemon hands them to other processes
    record.py      the record, `FleetStatus`, and the pure function that completes the daemon's records; `build`
    stored.py      the record and the figures of the runs from a directory: lock, live.json, roster, stores
    text.py        the record as lines for people

Rules:

1. Whether the daemon runs is decided by its lock, never by a file: a killed daemon leaves its files.
2. No device is blamed for the aggregator. Without a running daemon that is connected to the broker, it is unknown which devices
   are online; after a lost connection has come back, devices have `record.RETURN_S` seconds to connect again.
3. Each reason has advice to the operator.
4. Times are unix seconds inside, and ISO 8601 in UTC outside.

Example: the broker stops while a round waits for ``dev-2``. The daemon notes the lost connection in ``live.json``; the record
has ``connected`` false, a problem that names the broker, no missing device, and ``online`` null for each device.
"""
