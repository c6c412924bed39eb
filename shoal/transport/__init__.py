"""MQTT clients and brokers: the `Transport` interface, a client for real brokers, and brokers for trials.

- `base` defines the interface and its events. An acknowledged publish has reached the broker, not the recipient, and may
  arrive twice: the protocol acknowledges and removes duplicates itself.
- `mqtt` implements it with paho (`mqtt_connection` is one connection); the lab implements it in memory.
- `inbox` queues events for a program's loop; `retained` publishes retained payloads in chunks.
- `local_broker` starts mosquitto, or `amqtt_server`, on this machine for the demo, trials and tests.

Example: a message at QoS 1 to a device that is off waits at the broker, which may lose it; `Transport.publish` returns before.
"""
