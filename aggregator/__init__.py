"""The server of Shoal, program `shoal-aggregator`: groups devices and averages masked updates that it cannot read.

- It holds no mask secret and imports no code that could use one.
- An upload is acknowledged only after it is durable, and counts once, however often it arrives.
- The rules (`rounds`, `strategies`) are pure and do no I/O; `run_service` carries out their actions and `daemon` drives it.

`uploads` takes uploads from the first chunk to the acknowledgement, `storage` makes them durable, `numerics` has the
similarities and means, `publisher` sends announcements and models, and `inbound` tracks who is online.

A round: the engine opens it when enough devices are online; the service publishes models and the announcement; uploads
are validated, stored and acknowledged; the engine closes the round on the last upload or the deadline, and the strategy
turns the updates into new models.
"""
