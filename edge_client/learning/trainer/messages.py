"""Requests to own training code, its answers, and the memory that both processes see.

A request is one packet of JSON with the descriptor of a memory file (memfd) of a fixed size. In it are the request's arrays, each
at a multiple of ALIGNMENT. One of them is the result, which the answer's sender has written in place. An answer is one packet of
JSON: a few numbers, or the reason of a failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.errors import DocumentError, TrainerError
from shoal.protocol.recipe import LocalTraining
from shoal.util.state_codec import decode_state

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

MAX_REQUEST_BYTES: Final = 16 * 1024
MAX_ANSWER_BYTES: Final = 4 * 1024
MAX_REASON_CHARS: Final = 400
"""Most characters of a reason that own code gives for a failure."""
ALIGNMENT: Final = 64
"""Bytes; a cache line, which every dtype fits."""


@dataclass(frozen=True, slots=True)
class Area:
    """Dtype and shape of one array in the shared memory."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def room(self) -> int:
        """Bytes that it takes, with those that are left free behind it."""
        return -(-math.prod(self.shape) * np.dtype(self.dtype).itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be done.

    Attributes:
        action: begin, train, losses, score or predict.
        areas: the arrays; the last one is the result, unless the model is trained in place.
        recipe, seed: for train.
        name, version: for begin: those that the task names.
    """

    action: str
    areas: tuple[Area, ...]
    recipe: LocalTraining | None = None
    seed: int = 0
    name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome.

    Attributes:
        error: why it failed; empty if it did not.
        loss: mean training loss; steps: of a training.
        correct: labels answered right.
    """

    error: str = ""
    loss: float = 0.0
    steps: int = 0
    correct: int = 0


def packet_of(message: Request | Answer) -> bytes:
    """Return the packet of a message."""
    return json.dumps(asdict(message)).encode()


def parse_answer(packet: bytes) -> Answer:
    """Return the answer in a packet of own code.

    Raises:
        TrainerError: it is longer than MAX_ANSWER_BYTES or is no answer.
    """
    try:
        if len(packet) > MAX_ANSWER_BYTES:
            raise ValueError("too long")
        answer = decode_state(Answer, json.loads(packet))
    except (ValueError, RecursionError, DocumentError) as error:
        raise TrainerError(f"the trainer's answer is malformed: {str(error)[:80]}") from None
    return answer


def parse_request(packet: bytes) -> Request:
    """Return the request in a packet of the device."""
    return decode_state(Request, json.loads(packet))


def views(buffer: mmap.mmap, areas: Sequence[Area]) -> list[NDArray[Any]]:
    """Return an array in ``buffer`` for each area, one after another."""
    ends = accumulate(area.room for area in areas)
    return [
        np.frombuffer(buffer, area.dtype, math.prod(area.shape), end - area.room).reshape(area.shape)
        for area, end in zip(areas, ends, strict=True)
    ]
