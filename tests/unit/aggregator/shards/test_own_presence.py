"""What a worker or the aggregator says of its own start, and reads of others with its identity."""

import pytest

from aggregator.shards.membership import signed_presence, witness
from crypto.seal.identity import Identity
from shoal.errors import UntrustedError

IDENTITY = Identity.generate("aggregator")


def test_witness_reads_its_own_identity():
    """A witness reads births and rivals of its own identity only."""
    own = witness(IDENTITY, "reef", "s/state", 5)
    assert own.read(own.presence(9)) == (5, 9)
    assert own.read(signed_presence(IDENTITY, "reef", 9, online=True)) == (9, 0)
    assert own.read(signed_presence(IDENTITY, "reef", 9, online=False)) is None
    assert own.read(signed_presence(IDENTITY, "other", 9, online=True)) is None
    with pytest.raises(UntrustedError):
        own.read(signed_presence(Identity.generate("aggregator"), "reef", 9, online=True))
