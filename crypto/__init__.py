"""The cryptography of Shoal, in two separate packages.

- `crypto.mask` hides updates from the aggregator. Devices and the owner import it; the aggregator cannot (contracts of
  `lint-imports`, and tests/architecture/test_blindness.py).
- `crypto.seal` authenticates and encrypts everything that travels. Every party imports it.
- Primitives come from the package ``cryptography``; secrets appear in no repr, no error and no pickle.

Example: a device masks its update with `crypto.mask.masking.mask`, then signs it and seals it to the aggregator with
`crypto.seal.envelope.seal_to_member`. The aggregator opens the seal and averages vectors that are still masked.
"""
