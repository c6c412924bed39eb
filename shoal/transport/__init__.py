"""MQTT clients and brokers: the `Transport` interface, a client for real brokers, and an in-memory broker on virtual time.

- `base` defines the interface and its events. An acknowledged publish has reached the broker, not the recipient, and may
  arrive twice: the protocol acknowledges and removes duplicates itself.
- `mqtt` implements it with paho (`mqtt_connection` is one connection); `loopback` implements it in memory, with `faults`.
- `inbox` queues events for a program's loop; `retained` publishes retained payloads in chunks.
- `local_broker` starts mosquitto, or `amqtt_server`, on this machine for the demo, trials and tests.

Example: a message on the in-memory broker is delivered by `pump`, never before.

    >>> from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
    >>> broker, events = LoopbackBroker(), []
    >>> reader = LoopbackTransport(broker, "reader", events.append)
    >>> reader.start(); reader.subscribe("reef/#")
    >>> reader.publish("reef/news", b"hello")
    >>> _ = broker.pump()
    >>> events[-1].topic, events[-1].payload
    ('reef/news', b'hello')
"""
