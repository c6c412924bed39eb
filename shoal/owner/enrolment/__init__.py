"""Enrolment through the broker: one-time tokens, requests, approval, and publication of the roster and new secrets.

- A token admits one device, once, before it expires. It is marked as used on disk before the grant is published.
- A request counts only if it proves its token and the keys that it names; approval is by the device's fingerprint.
- `admission.Registrar` runs over any transport and reads no clock; `connection.OwnerConnection` is the same on an MQTT
  connection for the time of one command. `tokens` stores the tokens, `reminders` prints follow-up steps.

Example: the owner prints a line with ``shoal-fleet invite``; the device publishes a request with ``shoal-edge enrol``;
``shoal-fleet devices`` lists it as pending; ``shoal-fleet approve`` signs a roster with the device and publishes roster
and grant.
"""
