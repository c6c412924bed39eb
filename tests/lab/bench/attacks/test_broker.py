"""The broker's search of recorded traffic."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.broker import _population, found_in, groups_seen, senders_seen
from shoal_lab.bench.attacks.lab import CLASSES
from shoal_lab.bench.attacks.past.recording import Tap

from shoal.transport.faults import Hop, Passage

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_bytes_of_an_update_are_found_where_they_are():
    """The broker's search can succeed: in clear traffic it does."""
    vector = normal(500)
    raw = vector.astype("<f4").tobytes()
    assert found_in(vector, b"head" + raw + b"tail")
    assert not found_in(vector, normal(500, seed=8).tobytes())
    assert not found_in(np.zeros(500, np.float32), bytes(5000))


def test_groups_are_those_of_the_last_model_sent():
    def sent(client, label):
        return Passage(Hop.DOWN, client, f"shoal/v1/lab/s/model/{label}", b"")

    heard = [sent("a", "0" * 16), sent("b", "0" * 16), sent("b", "1" * 16)]
    assert groups_seen(heard) == {"a": "0" * 16, "b": "1" * 16}


def test_models_sent_to_the_broker_are_no_groups():
    """Only the model that a device is sent is its own; its uploads and the round are not."""
    up = Passage(Hop.UP, "a", f"shoal/v1/lab/s/model/{'1' * 16}", b"")
    other = Passage(Hop.DOWN, "a", "shoal/v1/lab/s/round", b"")
    down = Passage(Hop.DOWN, "a", f"shoal/v1/lab/s/model/{'0' * 16}", b"")
    assert groups_seen([down, up, other]) == {"a": "0" * 16}
    assert groups_seen([up, other]) == {}


def test_a_stretch_of_an_update_is_enough_to_be_found():
    """The first 24 bytes alone; zeros between them and the next stretch are no evidence."""
    vector = normal(500)
    raw = vector.astype("<f4").tobytes()
    assert found_in(vector, b"x" + raw[:24])
    assert not found_in(vector, raw[:23])
    sparse = np.zeros(500, np.float32)
    sparse[0] = 7.0
    assert not found_in(sparse, bytes(5000))
    assert found_in(sparse, sparse[:6].tobytes())


def test_uploads_are_named_by_the_topics_device():
    def sent(client, device, hop=Hop.UP):
        return Passage(hop, client, f"shoal/v1/lab/d/{device}/up", b"")

    heard = [sent("shoal-lab-dev-1", "dev-1"), sent("attacker", "dev-1"), sent("aggregator", "dev-2", Hop.DOWN)]
    assert senders_seen(heard) == 0.5


def test_the_tap_changes_nothing_on_the_way():
    """Every message arrives once, at once."""
    tap = Tap()
    passages = [Passage(Hop.UP, "a", "t", b"1"), Passage(Hop.DOWN, "b", "t", b"2")]
    assert [tuple(tap(p)) for p in passages] == [(0.0,), (0.0,)]
    assert tap.heard == passages


@pytest.mark.torch
def test_the_fleet_has_two_groups_of_devices_whose_labels_differ(lab):
    data, truth = _population(lab)
    assert sorted(data) == list(data)
    assert truth == [0, 1] * 4
    for (name, own), group in zip(data.items(), truth, strict=True):
        brightest = own.x[:, :CLASSES].argmax(1)
        assert np.array_equal(own.y, (brightest + group) % CLASSES), name
