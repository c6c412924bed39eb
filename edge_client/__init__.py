"""The device of Shoal, program `shoal-edge`: training without torch, masking, sealing, and a resumable protocol.

- Data, clear models and the keys of the masks stay on the device; uploads are masked, signed and sealed to the aggregator.
- An announcement or a mean that the owner's signed plan does not allow is refused.
- An upload is durable before its first byte is sent, so that a restart sends the same bytes.

`cli` and `daemon` are the program, `runtime` connects a transport to the rest: `protocol` decides, `run` checks the
owner's plan and prepares jobs, `learning` trains, `models` holds the models, `storage` the other files.

A round on a device: an announcement arrives; `protocol` subscribes to the means that it names; they are unmasked, checked and
added to the models; a worker scores these, trains the best, masks and seals the update; the upload is stored and sent once,
and those chunks that the aggregator misses are sent again until it acknowledges the upload.
"""
