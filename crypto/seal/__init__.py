"""Identities, signatures, envelopes, passphrases and replay protection, for every party.

- Each party has an Ed25519 key to sign and an X25519 key to receive sealed messages (`identity`).
- A device receives secrets under one-time keys, which it erases (`receiving`).
- An envelope is sealed to one member (HPKE) or under a group's key (AES-256-GCM), and always signed by its sender. The
  signature is checked before anything is decrypted (`envelope`).
- Every failure to open an envelope is the same `SealError`; the reason stays in the local log.
- A device refuses a roster, run or round older than one it has accepted (`replay`).

`signed` signs documents that are not secret (roster, run plan, card); `passphrase` encrypts a file under a passphrase.

Example: a signature binds a purpose and a content to a party.

    >>> from crypto.seal.identity import Identity, verify
    >>> device = Identity.generate("pi-07")
    >>> signature = device.sign("greeting", b"hello")
    >>> verify(device.member.sign_key, "greeting", b"hello", signature)
"""
