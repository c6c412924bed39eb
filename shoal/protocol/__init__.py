"""Everything that crosses the network, as values: messages, their encoding, topics and chunks. No sockets, no keys.

- `messages`, `documents`, `enrolment`, `epochs` and `states` define the messages as frozen dataclasses.
- `codec` gives every message exactly one encoding. Any bytes decode to a message or raise `WireError`; no length is
  trusted before it is checked.
- `topics` is the only place that builds or parses MQTT topics.
- `chunking` cuts a payload into packets, `reassembly` joins them within a memory budget for each sender, and `sizes`
  gives the largest size of each message of a run.
- `precision` encodes vectors in fewer bytes than float32, as the run plan says.

Example: the topic on which a device uploads, and its meaning.

    >>> from shoal.protocol.topics import Topics
    >>> Topics("reef").up("pi-07")
    'shoal/v1/reef/d/pi-07/up'
    >>> Topics("reef").parse("shoal/v1/reef/d/pi-07/up").kind.name
    'UP'
"""
