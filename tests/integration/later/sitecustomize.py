"""Turn today's program into one of another version, as far as the wire shows it.

Python imports this module first, in a process that has this folder on its path, and again where a device's program replaces
itself.

The variable SHOAL_TEST_LATER has a JSON object:

    later   whether signed messages have two fields that no version knows, and each message is followed by one of an optional kind
    wire    wire version, in place of today's

Its software version is 99.0.0.
"""

import dataclasses
import json
import os

import shoal.version

CHOSEN = json.loads(os.environ["SHOAL_TEST_LATER"])
shoal.version.VERSION = "99.0.0"
shoal.version.WIRE = CHOSEN.get("wire", shoal.version.WIRE)
SIGNED = [
    "Announcement",
    "Control",
    "Notice",
    "OwnerAnswer",
    "Presence",
    "Upload",
    "Decline",
    "Reminder",
    "ReceivingNotice",
]
"""Messages that the program signs itself, and never encodes again as others have signed them."""
FIELDS = ((1, b"a field of a later version"), (65535, bytes(100)))
KIND = 200
TOPICS = ("/up", "/ctl", "/s/round", "/o/answer")

if CHOSEN.get("later"):
    from shoal.protocol import chunking, codec

    assert KIND in chunking.OPTIONAL_KINDS
    known = codec.encode

    def encode(value):
        if type(value).__name__ in SIGNED and not value.later:
            value = dataclasses.replace(value, later=FIELDS)
        return known(value)

    codec.encode = encode

    from shoal.transport.mqtt import MqttTransport

    publish = MqttTransport.publish

    def publish_twice(self, topic, payload, *, retain=False, qos=1):
        payload = bytes(payload)
        if topic.endswith(TOPICS) and len(payload) > chunking.HEADER_BYTES:
            # Not retained: it must not take the place of the announcement.
            publish(self, topic, payload[:5] + bytes([KIND]) + payload[6:], qos=qos)
        publish(self, topic, payload, retain=retain, qos=qos)

    MqttTransport.publish = publish_twice
