"""Attacks on uploads of past rounds, on a loopback fleet with real keys and messages.

- `recording` reads the uploads that broker and aggregator saw; `theft` collects the secrets in a device's directory and memory.
- `keyring` derives every key that it can from stolen secrets, and opens recorded uploads.
- `rounds` runs a fleet that is stolen from: a newcomer, a device in step, and a device that was absent.
- `restored` runs two fleets from one backup of the owner's directory, and counts the masks that both use.

Example: the newcomer's grant holds the secret of the key version that was drawn for it, and the keyring opens the uploads since.
"""
