"""Simulated links: what a device sends and receives is what a fleet's would, and bytes are counted."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.precision.seeds import mean_seed
from shoal.simulation.engine.links import Links
from tests.helpers.masks import key_of
from tests.helpers.plans import D, run_plan
from tests.unit.shoal.simulation.engine.test_simulate import figures, run

pytestmark = pytest.mark.torch
UPDATE = np.linspace(-1, 1, D, dtype=np.float32)


def links_of(up="int8", down="int8"):
    return Links(run_plan(precision_up=up, precision_down=down))


def test_residual_joins_the_next_update():
    """An update is decoded and its residual is added to the next of the same model."""
    links, key = links_of(), key_of("permutation", D)
    first = links.update(UPDATE, key, device="a", model=0, phase=1, round_=1)
    (residual,) = links._residuals.values()
    links.exact = {}
    links.update(UPDATE, key, device="a", model=0, phase=1, round_=2)
    assert np.allclose(np.sort(links.exact["a"]), np.sort(UPDATE + residual.vector()))
    assert links.up == (2 * encoded_bytes(D, "int8"), 2)
    other = links_of().update(UPDATE, key, device="a", model=0, phase=1, round_=1)
    assert (first == other).all()
    links.update(UPDATE, key, device="a", model=1, phase=1, round_=3)
    assert np.allclose(np.sort(links.exact["a"]), UPDATE), "another model: nothing is added"


def test_float32_leaves_vectors_as_they_are():
    links = links_of("float32", "float32")
    assert (links.update(UPDATE, None, device="a", model=0, phase=1, round_=1) == UPDATE).all()
    assert links.mean(UPDATE, model=0, round_=1) is UPDATE
    assert links.up == (4 * D, 1)
    assert not links._residuals


def test_a_mean_is_what_every_device_decodes():
    found = links_of().mean(UPDATE, model=3, round_=2)
    seed = mean_seed(run_plan().run_id, 2, 3)
    assert (found == decode(encode(UPDATE, "int8", seed), D, "int8")).all()


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_other_precision_ends_near_float32(precision):
    """A run in another precision ends near that of float32."""
    exact = run("ifca", {"k": "2"}, mode="rotation")
    rounded = run("ifca", {"k": "2"}, mode="rotation", precision_up=precision, precision_down=precision)
    assert rounded.clusters == exact.clusters
    assert abs(figures(rounded)[-1].accuracy - figures(exact)[-1].accuracy) < 5
    up, down = rounded.workforce.models.links.up, rounded.workforce.models.links.down
    whole = exact.workforce.models.links.up
    assert up[1] == whole[1]
    assert up[0] < 0.6 * whole[0]
    assert down[1] > 0


def test_a_run_with_residuals_is_not_stored(tmp_path):
    with pytest.raises(ConfigError, match="residuals"):
        run("fedavg", precision_up="int8", checkpoint=tmp_path / "run")
