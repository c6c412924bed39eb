"""Protocol decisions of a device, without training and without files.

- `round_state.step` is a pure transition ``(state, event) -> (state, actions)``; the runtime carries the actions out.
- An upload is sent once. Afterwards the device sends short reminders with growing pauses, and only those chunks again that
  the aggregator asks for.
- A device that cannot do its part says so at once (`declining`), so that no round waits for it.

`model_feed` subscribes to the means and checkpoints of a round, `resync` fetches retained messages that were lost,
`roster_sync` follows the roster, `uplink` sends the upload, `notes` the short messages, `patience` times reminders,
`presence` announces the device, `inbound` bounds the transfers that it accepts.

Stages of a round: ``IDLE``, an announcement, ``FETCHING`` until the models are up to date, ``WORKING`` until the upload is
stored, ``SENDING`` until it is answered, ``IDLE``.
"""
