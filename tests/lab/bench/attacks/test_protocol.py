"""A device's checks before it uses a forged mean."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.protocol import device_model, signed_plan

from shoal.errors import UntrustedError


@pytest.mark.torch
def test_a_device_checks_the_forged_means_of_an_active_aggregator(lab):
    """The checks of the real policy stand between: too long an offset and too few contributors are refused."""
    plan = signed_plan(lab, "permutation")
    spike = np.zeros(lab.length, np.float32)
    spike[7] = 20.0
    assert np.count_nonzero(device_model(lab, "permutation", spike) != lab.origin) == 1
    with pytest.raises(UntrustedError, match="is allowed for one step"):
        device_model(lab, "permutation", np.full(lab.length, 10 * plan.norm_limit, np.float32))
    with pytest.raises(UntrustedError, match="a mean of 2 devices"):
        device_model(lab, "permutation", spike, contributors=2)
