"""An upload passes the gate once every worker has reported its part with the digest of the header."""

from types import SimpleNamespace

import pytest

from aggregator.shards.coordinator import PartsGate
from aggregator.storage.store import OpenedUpload, UploadRef
from shoal.protocol.jobs import PartReport, StoredPart
from shoal.protocol.messages import Phase

DIGESTS = (b"\0" * 32, b"\1" * 32)


def upload(device="dev-1"):
    header = SimpleNamespace(parts=DIGESTS, phase=Phase.TRAIN, round=3)
    return OpenedUpload(header, b"", UploadRef(device, bytes(16)), bytes(32), 0.0, start=0)


def report(worker, round_=3, device="dev-1", digest=None, squared=9.0):
    part = StoredPart(device, Phase.TRAIN, DIGESTS[worker] if digest is None else digest, squared)
    return PartReport(bytes(16), worker, round_, (part,))


@pytest.mark.parametrize("first", [True, False])
def test_parts_come_in_any_order(first):
    """Header and reports come in any order."""
    gate = PartsGate()
    if first:
        assert gate.hold(upload()) is None
    assert gate.report(report(1, squared=16.0)) == []
    whole = gate.report(report(0))
    if not first:
        assert whole == []
        whole = [gate.hold(upload())]
    assert [u.norm for u in whole] == [5.0]
    assert gate.held == {}


def test_another_digest_completes_nothing():
    """Another digest or round completes nothing."""
    gate = PartsGate()
    assert gate.hold(upload()) is None
    assert gate.report(report(0)) == []
    assert gate.report(report(1, digest=b"?" * 32)) == []
    assert gate.report(report(1, round_=2)) == []
    assert gate.lacks(2) == {1: 1}
    assert gate.report(report(1)) != []


def test_upload_of_a_closed_round_is_gone():
    """An upload whose round has closed is forgotten."""
    gate = PartsGate()
    held = upload()
    gate.hold(held)
    assert gate.held["dev-1"] is held
    del gate.held["dev-1"]
    assert (gate.held, gate.report(report(0)), gate.report(report(1))) == ({}, [], [])
