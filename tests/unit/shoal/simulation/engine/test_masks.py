"""The masks of a simulated run are those that a fleet's key schedule gives, one for each round."""

import numpy as np
import pytest

from crypto.mask.derivation import derive
from crypto.mask.schedule import VersionKey
from shoal.errors import IntegrityError
from shoal.simulation.engine.masks import KEY_VERSION, RoundMasks
from shoal.types import Segment

SEGMENTS = (Segment("cluster", 40),)


def masks(seed=7):
    return RoundMasks(fleet="reef", run_id=b"run", seed=seed, task_digest=bytes(32), mode="rotation", segments=SEGMENTS)


def applied(key):
    out = np.empty(40, np.float32)
    key.apply(np.arange(40, dtype=np.float32), out)
    return out


def test_masks_follow_from_the_schedule():
    """They follow from the key schedule also if rounds are left out."""
    chain = VersionKey("reef", KEY_VERSION, (7).to_bytes(32, "little")).begin_run(b"run", 1)
    made = masks()
    for round_ in (1, 2, 5):
        chain.skip_to(round_)
        keys = chain.take()
        np.testing.assert_array_equal(
            applied(made.take(round_)), applied(derive(keys.mask, keys.context(bytes(32), "rotation", SEGMENTS)))
        )


def test_rounds_and_seeds_have_own_masks():
    """Rounds and seeds have masks of their own."""
    made = masks()
    seen = [made.take(1), made.take(2), masks(8).take(1)]
    assert len({key.key_id for key in seen}) == len({applied(key).tobytes() for key in seen}) == 3
    np.testing.assert_array_equal(applied(masks().take(1)), applied(seen[0]))


def test_no_round_is_given_out_twice():
    made = masks()
    made.take(3)
    with pytest.raises(IntegrityError):
        made.take(3)
