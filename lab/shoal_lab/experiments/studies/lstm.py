"""The network of fedgroup-sent140: two layers of LSTM over word vectors, then two dense layers (Duan et al., Table II).

Word vectors are frozen, so they are no part of theta: every device has the same, drawn from a fixed seed. Sizes are
those of the published model (243,861 parameters), but for torch's second bias in each LSTM layer (800), and two outputs in place
of one (31).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.simulation.trainers.networks import Network

VECTORS_SEED: Final = 140
DENSE: Final = 30
LAYERS: Final = 2
OUTPUTS: Final = 2


@dataclass(frozen=True, slots=True)
class TweetLstm(Network):
    """Negative or positive: x (n, words) int64, y (n,) int64.

    Attributes:
        vocabulary: tokens; embedding: length of a word's vector; hidden: units of a layer.
        vectors: shape (vocabulary, embedding), float32: the words' vectors.
    """

    vocabulary: int
    embedding: int = 300
    hidden: int = 100
    vectors: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        drawn = np.random.default_rng(VECTORS_SEED).standard_normal((self.vocabulary, self.embedding), np.float32)
        object.__setattr__(self, "vectors", torch.from_numpy(drawn))

    def module(self) -> nn.Module:
        """Return the trained layers as a fresh torch module, initialised from torch's global generator."""
        lstm = nn.LSTM(self.embedding, self.hidden, LAYERS, batch_first=True)
        return nn.ModuleList([lstm, nn.Linear(self.hidden, DENSE), nn.Linear(DENSE, OUTPUTS)])

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, 2) of the state after the last word; as published, there is no activation between dense layers."""
        words = functional.embedding(x, self.vectors.to(x.device))
        zeros = words.new_zeros(LAYERS, len(x), self.hidden)
        weights = list(params[: 4 * LAYERS])
        states = torch.lstm(words, (zeros, zeros), weights, True, LAYERS, 0.0, True, False, True)[0]
        w1, b1, w2, b2 = params[4 * LAYERS :]
        return functional.linear(functional.linear(states[:, -1], w1, b1), w2, b2)
