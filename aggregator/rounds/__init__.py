"""The rules of a run, free of I/O: when rounds open and close, and which uploads count.

- `Engine.handle` is a pure transition ``(state, event) -> (state, actions)``: no clock, socket, disk or random source.
- The first durable upload of a device in a round counts; identical bytes are a duplicate, other bytes are refused.
- A round closes when every ordered device has answered, or with a quorum once the others are offline or late.
- Only opening and closing a round may take time that grows with the fleet.

`events` are the engine's inputs and outputs, `state` its state, `quorum_and_deadline` the rules by which a round opens and
closes, `screening` the limit on an update's norm relative to the others. `opening`, `held_models` and `relay` are about the
models, which devices hold: the aggregator knows their names, and the masked means that devices add to them.

Example: ``CameOnline`` events until enough devices are there; an `OpenRound` action; a `ClientUpdate` for each durable
upload; after the last of them, `RoundClosed` with the round's figures, and `OpenRound` for the next.
"""
