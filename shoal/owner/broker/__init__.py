"""Mosquitto's files for a fleet: configuration, passwords, access list and certificates.

- Each user reaches its own topics and the fleet's shared ones, nothing else; a user who is not listed reaches nothing.
- Passwords are derived from one secret (`shoal.owner.keys.broker_users`), so the same users get the same passwords again.
- The CA's key stays in the owner's directory; the broker gets the server's key and certificate.

Example: ``shoal-fleet broker-config DIR FOLDER`` writes ``shoal.conf``, ``shoal.acl``, ``passwords`` and, for an
``mqtts`` address, the certificates to FOLDER. Copy them to the broker's host and reload mosquitto.
"""
