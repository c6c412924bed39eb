"""The plan and the task in a run package: only those that the owner has signed for this fleet."""

import dataclasses

import pytest

from crypto.seal.identity import sign_document
from edge_client.run.policy import check_followable, open_plan, owners_plan, task_of
from shoal.errors import IntegrityError, ShoalError, UntrustedError, WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage, SegmentSpec
from tests.helpers.plans import run_plan

D = 15


def packed(signer, **changes):
    """Return a run package without task and origins."""
    return encode(RunPackage(sign_document(signer, run_plan(**{"fleet": "reef", **changes})), b"", b""))


def test_the_owners_plan_is_returned(parties):
    """A plan that the owner did not sign is refused."""
    member = parties.members["dev-1"]
    package = packed(parties.owner.owner)
    assert open_plan(package, member) == owners_plan(package, member) == run_plan(fleet="reef")
    with pytest.raises(UntrustedError):
        owners_plan(packed(parties.server.identity), member)
    with pytest.raises(WireError):
        owners_plan(b"no package", member)


@pytest.mark.parametrize("changes", [{"fleet": "atoll"}, {"mode": "scramble"}])
def test_unfollowable_plan_is_the_owners(parties, changes):
    """So the device declines the rounds of that run."""
    member = parties.members["dev-1"]
    plan = owners_plan(packed(parties.owner.owner, **changes), member)
    for refuse in (
        lambda: check_followable(plan, member),
        lambda: open_plan(packed(parties.owner.owner, **changes), member),
    ):
        with pytest.raises(UntrustedError, match="a run plan") as caught:
            refuse()
        assert caught.value.hint or "fleet" in changes


def test_only_task_that_plan_names_is_opened(logistic):
    bundle = logistic(4, 3)
    plan = run_plan(task_digest=bundle.digest, segments=(SegmentSpec("cluster", D),))
    data = memoryview(bundle.to_bytes())
    assert task_of(data, plan).digest == bundle.digest
    parted = dataclasses.replace(plan, segments=(SegmentSpec("shared", D - 3), SegmentSpec("cluster", 3)))
    for other in (dataclasses.replace(plan, task_digest=bytes(32)), parted):
        with pytest.raises(IntegrityError, match="not the one that the run plan names"):
            task_of(data, other)
    with pytest.raises(ShoalError):
        task_of(data[:-1], plan)
