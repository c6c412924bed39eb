"""The keyring derives later keys from any secret that it is given, and never earlier ones."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.past.keyring import Keyring, opened
from shoal_lab.bench.attacks.past.recording import SeenUpload
from shoal_lab.bench.attacks.past.theft import Loot

from crypto.mask.derivation import derive
from crypto.mask.masking import mask
from crypto.mask.schedule import VersionKey
from crypto.seal.identity import Identity
from shoal.protocol.documents import SegmentSpec
from shoal.types import Segment
from tests.helpers.plans import run_plan

LENGTH = 8
VECTOR = np.linspace(-1, 1, LENGTH, dtype=np.float32)
DRAWN = bytes(range(32))
VERSION, RUN = 5, 2
ROUNDS = range(1, 6)
SEGMENTS = (Segment("cluster", LENGTH),)


def plan():
    return run_plan(run=RUN, mode="rotation", task_digest=bytes(32), segments=(SegmentSpec("cluster", LENGTH),))


def loot(*secrets, masks=()):
    return Loot(Identity.generate("dev-00"), frozenset(secrets), (), tuple(masks))


def seen(round_, key):
    masked = mask(VECTOR, key).values
    return SeenUpload(
        device="dev-00",
        round=round_,
        key_version=VERSION,
        key_id=key.key_id,
        masked=masked,
        digest=bytes(32),
    )


def chain_at(round_):
    p = plan()
    version = VersionKey(p.fleet, VERSION, DRAWN)
    version.skip_to_run(RUN)
    chain = version.begin_run(p.run_id)
    chain.skip_to(round_)
    return chain


def round_key(round_):
    keys = chain_at(round_).take()
    return derive(keys.mask, keys.context(bytes(32), "rotation", SEGMENTS))


UPLOADS = [seen(r, round_key(r)) for r in ROUNDS]


def rounds_opened(stolen):
    masks = Keyring(UPLOADS, plan()).masks(stolen)
    return [u.round for u in UPLOADS if np.allclose(opened(u, masks), VECTOR, atol=1e-6)]


@pytest.mark.parametrize("at", ROUNDS)
def test_a_chain_gives_its_rounds_and_those_after(at):
    assert rounds_opened(loot(chain_at(at).reveal())) == list(range(at, 6))


def test_a_rounds_mask_secret_and_a_derived_mask_give_their_round():
    assert rounds_opened(loot(chain_at(3).take().mask.reveal())) == [3]
    assert rounds_opened(loot(masks=[round_key(2)])) == [2]


@pytest.mark.parametrize(("run", "found"), [(1, list(ROUNDS)), (2, list(ROUNDS)), (3, [])])
def test_a_versions_secret_gives_all_rounds_unless_it_was_stepped_past_the_run(run, found):
    version = VersionKey(plan().fleet, VERSION, DRAWN)
    version.skip_to_run(run)
    assert rounds_opened(loot(version.reveal())) == found


def test_other_secrets_give_nothing():
    assert rounds_opened(loot(bytes(32), bytes([1]) * 32, chain_at(6).reveal(), chain_at(2).take().content)) == []
