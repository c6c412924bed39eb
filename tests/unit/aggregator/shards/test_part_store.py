"""A worker's store: parts are durable before they are reported, and erased once no round needs them."""

import dataclasses
import hashlib
from contextlib import closing

import numpy as np
import pytest

from aggregator.shards.part_store import PartStore
from shoal.errors import IntegrityError
from shoal.protocol.jobs import MeanOnBroker, ShardOrder, StoredPart
from shoal.protocol.messages import Phase
from tests.helpers.plans import run_plan

LENGTH = 16
PART = np.arange(LENGTH, dtype="<f4")


def stored(device="dev-1", part=PART):
    return StoredPart(device, Phase.TRAIN, hashlib.sha256(part.tobytes()).digest(), float(part @ part))


def order(round_, **changes):
    fixed = ShardOrder(
        run_id=bytes(16),
        birth=1,
        number=round_,
        round=round_,
        nonce=bytes(16),
        key_version=0,
        keep=max(1, round_ - 1),
        devices=(),
        means=(),
        plan=b"",
    )
    return dataclasses.replace(fixed, **changes)


@pytest.fixture
def store(tmp_path):
    with closing(PartStore(tmp_path / "run", run_plan(), LENGTH)) as found:
        yield found


def test_a_part_is_stored_with_the_commit(store):
    store.write(1, stored(), PART.data.cast("B"))
    assert (store.waiting, store.stored(1), store.commit()) == (True, [], [(1, stored())])
    assert (store.waiting, store.stored(1), store.stored(1, "dev-2")) == (False, [stored()], [])
    assert store.reader(1)("dev-1").tolist() == PART.tolist()
    assert store.lacking(1, ("dev-1", "dev-2"), (stored().digest, bytes(32))) == ("dev-2",)


def test_torn_part_is_found(tmp_path):
    """Parts survive a restart and a torn one is found."""
    first = PartStore(tmp_path / "run", run_plan(), LENGTH)
    first.write(1, stored(), PART.data.cast("B"))
    first.commit()
    first.close()
    file = next((tmp_path / "run" / "parts").glob("0*.f32"))
    again = PartStore(tmp_path / "run", run_plan(), LENGTH)
    assert again.reader(1)("dev-1").tolist() == PART.tolist()
    again.close()
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    torn = PartStore(tmp_path / "run", run_plan(), LENGTH)
    with pytest.raises(IntegrityError, match="altered or is torn"):
        torn.reader(1)("dev-1")
    torn.close()


def test_an_order_erases_what_no_round_needs(store):
    for round_ in (1, 2):
        store.write(round_, stored(), PART.data.cast("B"))
        store.commit()
    digest = store.write_mean(1, b"mean of round 1")
    kept = store.write_mean(2, b"mean of round 2")
    store.keep_order(order(3, means=(MeanOnBroker(0, 2, bytes(16), 4, "", kept),)))
    assert (store.stored(1), store.stored(2)) == ([], [stored()])
    assert store.mean(2, kept) == b"mean of round 2"
    with pytest.raises(IntegrityError, match="missing or altered"):
        store.mean(1, digest)
    store.keep_order(order(4, finished=True))
    assert (store.stored(2), store.order) == ([], order(4, finished=True))


def test_directory_of_another_run_is_refused(tmp_path):
    PartStore(tmp_path / "run", run_plan(), LENGTH).close()
    with pytest.raises(IntegrityError, match="another run"):
        PartStore(tmp_path / "run", dataclasses.replace(run_plan(), run=99), LENGTH)
