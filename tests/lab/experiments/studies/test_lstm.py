"""The network of fedgroup-sent140."""

import numpy as np
import pytest
import torch
from shoal_lab.experiments.studies.tasks import TweetLstm

from shoal.simulation.trainers.networks import unflatten

pytestmark = pytest.mark.torch


def test_the_lstm_has_the_published_size():
    network = TweetLstm(50)
    assert network.length == 243_861 + 2 * 400 + 31
    assert len(network.init(3)) == network.length
    assert np.array_equal(network.init(3), network.init(3))


def test_the_lstm_equals_its_module():
    network = TweetLstm(20, 5, 4)
    torch.manual_seed(0)
    lstm, first, second = module = network.module()
    x = torch.randint(0, 20, (3, 7))
    expected = second(first(lstm(network.vectors[x])[0][:, -1]))
    torch.testing.assert_close(network.forward(list(module.parameters()), x), expected)


def test_word_vectors_are_fixed():
    one, other = TweetLstm(20, 5, 4), TweetLstm(20, 5, 4)
    assert torch.equal(one.vectors, other.vectors)
    assert one == other
    assert one.vectors.shape == (20, 5)
    assert one.length == TweetLstm(2000, 5, 4).length


def test_the_order_of_words_matters():
    """The state after the last word is read, not a mean."""
    network = TweetLstm(20, 5, 4)
    params = unflatten(network, torch.from_numpy(network.init(1)))
    outputs = network.forward(params, torch.tensor([[1, 2, 3], [3, 2, 1], [1, 2, 3]]))
    assert outputs.shape == (3, 2)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], outputs[1])


def test_dense_layers_have_no_activation():
    """As published: the answer is linear in the first dense layer, also where its outputs are negative."""
    network = TweetLstm(20, 5, 4)
    params = unflatten(network, torch.from_numpy(network.init(1)))
    x = torch.tensor([[4, 5]])
    plain = network.forward(params, x)
    params[-4], params[-3] = -params[-4], -params[-3]
    torch.testing.assert_close(network.forward(params, x) - params[-1], params[-1] - plain)
