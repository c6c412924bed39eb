"""A worker joins with a grant of its own, and its card is no device's and no aggregator's."""

import pytest

from aggregator.shards import membership
from shoal.errors import ConfigError, UntrustedError, UsageError
from shoal.owner.keys.directory import FleetDirectory


def test_a_worker_joins_and_leaves(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://localhost")
    card = membership.init(tmp_path / "w", "worker-0").read_bytes()
    grant = fleet.add_helper("worker", card)
    member = membership.join(tmp_path / "w", grant.read_bytes(), fleet.fingerprint)
    assert fleet.workers == (member.identity.member,)
    assert member.group == fleet.broadcast
    member.use_version(99)  # no newer secrets wait
    with pytest.raises(UntrustedError, match="asks to be 'worker'"):
        fleet.add_aggregator(card)
    with pytest.raises(ConfigError, match="another user of the broker"):
        fleet.add_helper("worker", membership.init(tmp_path / "o", "owner").read_bytes())
    fleet.remove_helper("worker", "worker-0")
    assert fleet.workers == ()
    with pytest.raises(UsageError, match="no worker"):
        fleet.remove_helper("worker", "worker-0")
