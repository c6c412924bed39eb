"""A fleet in one process on virtual time, for tests and measurements that must be replayed exactly.

- `transport` implements `shoal.transport.base` in memory; faults decide which messages arrive, and when.
- `fleet` runs the real protocol over it: the same code as in the programs, and the same files.

Example: a message on the in-memory broker is delivered by `pump`, never before.

    >>> from shoal_lab.loopback.transport import LoopbackBroker, LoopbackTransport
    >>> broker, events = LoopbackBroker(), []
    >>> reader = LoopbackTransport(broker, "reader", events.append)
    >>> reader.start(); reader.subscribe("reef/#")
    >>> reader.publish("reef/news", b"hello")
    >>> _ = broker.pump()
    >>> events[-1].topic, events[-1].payload
    ('reef/news', b'hello')
"""
