"""Protocol decisions of a device, without training and without files.

- `session.DeviceSession` is one frozen state. A message, an event or a tick gives the next state and the actions that the
  runtime carries out; `session_io` lists both.
- An upload is sent once. Afterwards the device sends short reminders with growing pauses, and only those chunks again that
  the aggregator asks for.
- A device that cannot do its part says so at once (`declining`), so that no round waits for it.

The parts of a session are frozen too: `round_state` for the round, `roster_sync` for the roster, `resync` for retained
messages that were lost, `presence`, `declining`. `inbound` bounds the transfers that a device in a given state accepts. `uplink`
sends the upload and `notes` the short messages, for the runtime.

Stages of a round: ``IDLE``, an announcement, ``FETCHING`` until the models are up to date, ``WORKING`` until the upload is
stored, ``SENDING`` until it is answered, ``IDLE``.
"""
