"""Packets and shared memory of own training code."""

import mmap

import pytest

from edge_client.learning.trainer.messages import (
    MAX_ANSWER_BYTES,
    Answer,
    Area,
    Request,
    packet_of,
    parse_answer,
    parse_request,
    views,
)
from shoal.errors import TrainerError
from shoal.protocol.recipe import LocalTraining

RECIPE = LocalTraining(epochs=2, batch_size=8, lr=0.1, prox_mu=0.5)


def test_packets_read_what_they_say():
    request = Request(action="train", areas=(Area("float32", (3, 2)), Area("int64", ())), recipe=RECIPE, seed=7)
    assert parse_request(packet_of(request)) == request
    answer = Answer(loss=0.5, steps=3, correct=2)
    assert parse_answer(packet_of(answer)) == answer


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 3000,
        packet_of(Answer(loss=float("nan"))),
        packet_of(Answer()).replace(b'"steps": 0', b'"steps": "0"'),
        packet_of(Answer(error="x" * MAX_ANSWER_BYTES)),
    ],
)
def test_a_malformed_answer_is_refused(packet):
    with pytest.raises(TrainerError, match="malformed"):
        parse_answer(packet)


def test_arrays_have_places_of_their_own():
    areas = (Area("float32", (3,)), Area("uint8", (0,)), Area("int64", (2, 2)))
    assert [area.room for area in areas] == [64, 0, 64]
    memory = mmap.mmap(-1, 128)
    first, _, last = views(memory, areas)
    first[:], last[:] = 1, 2
    assert [array.sum() for array in views(memory, areas)] == [3, 0, 8]
