"""The process of own training code: `python -m edge_client.learning.trainer.child PACKAGE:CLASS FD BYTES`.

It answers one request after another until the device closes the socket. It ends with the device, at once: Linux kills it when the
thread that began it ends.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.trainer.messages import (
    MAX_REASON_CHARS,
    MAX_REQUEST_BYTES,
    Answer,
    Request,
    packet_of,
    parse_request,
    views,
)
from edge_client.trainer import Trainer
from shoal.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PR_SET_PDEATHSIG: Final = 1
_FIRST_TO_GO: Final = "1000"
"""Of oom_score_adj: where memory is short, the kernel ends this process before any other."""


def main() -> None:
    """Run the program."""
    spec, descriptor, most_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold samples
    with suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager sends them to both; the device ends this process
        signal.signal(number, signal.SIG_IGN)
    serve(socket.socket(fileno=descriptor), spec)


def serve(link: socket.socket, spec: str) -> None:
    """Answer requests until the link is closed. The first is `begin`, which makes the trainer that ``spec`` names."""
    trainer: Trainer | None = None
    while True:
        packet, descriptors, _, _ = socket.recv_fds(link, MAX_REQUEST_BYTES, 1)
        if not packet:
            return
        try:
            request = parse_request(packet)
            with os.fdopen(descriptors[0]) as file:
                arrays = views(mmap.mmap(file.fileno(), 0), request.areas)
            if trainer is None:
                trainer = load(spec)
            answer = carry_out(trainer, request, arrays)
            del arrays
        except Exception as error:  # noqa: BLE001 - own code may raise anything
            traceback.print_exc()
            answer = Answer(error=reason(error))
        link.sendall(packet_of(answer))


def reason(error: Exception) -> str:
    """Return the words for an error, at most MAX_REASON_CHARS of them."""
    text = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
    return text.encode(errors="replace").decode()[:MAX_REASON_CHARS] or type(error).__name__


def load(spec: str) -> Trainer:
    """Import PACKAGE:CLASS and return an object of the class.

    Raises:
        TaskError: the class is no `Trainer`.
    """
    module, _, name = spec.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise TaskError(f"{spec} is no class that is derived from edge_client.trainer.Trainer")
    return found()


def carry_out(trainer: Trainer, request: Request, arrays: Sequence[NDArray[Any]]) -> Answer:
    """Do what a request asks for, and write the result into its array.

    Raises:
        TaskError: the trainer is another than the task names, or its result has the wrong shape or is not finite.
    """
    result = arrays[-1]
    match request.action:
        case "begin":
            _check(trainer, request, bytes(arrays[0]).decode())
        case "train" if request.recipe is not None:
            loss, steps = trainer.train(arrays[0], arrays[1], arrays[2], request.recipe, request.seed)
            if not math.isfinite(loss):
                raise TaskError(f"the mean training loss is {loss}")
            return Answer(loss=float(loss), steps=int(steps))
        case "losses":
            _fill(result, trainer.losses(*arrays[:-1]), "losses")
        case "score":
            _fill(result, trainer.losses(*arrays[:-1]), "losses")
            return Answer(correct=int(trainer.correct(*arrays[:-1])))
        case "predict":
            _fill(result, trainer.predict(*arrays[:-1]), "predict")
        case _:
            raise TaskError(f"there is no action {request.action!r}")
    return Answer()


def _fill(result: NDArray[Any], found: Any, what: str) -> None:
    values = np.asarray(found)
    if values.shape != result.shape:
        raise TaskError(f"{what} returned shape {values.shape}, not {result.shape}")
    result[...] = values


def _check(trainer: Trainer, request: Request, layout: str) -> None:
    """Check that name, version and layout are those of the task.

    Raises:
        TaskError: one is not.
    """
    if (trainer.name, trainer.version) != (request.name, request.version):
        raise TaskError(
            f"the task is for {request.name} {request.version}, and this device has {trainer.name} {trainer.version}"
        )
    wanted, own = layout.splitlines(), layout_lines(trainer.layout())
    for ours, theirs in zip(own, wanted, strict=False):
        if ours != theirs:
            raise TaskError(f"the task's layout has {theirs} where this device's has {ours}")
    if len(own) != len(wanted):
        raise TaskError(f"the task's layout has {len(wanted)} parameters, and this device's {len(own)}")


def layout_lines(layout: Any) -> list[str]:
    """Return a line for each parameter of a layout, which is a mapping of names to shapes."""
    return [f"{name} {tuple(map(int, shape))}" for name, shape in layout.items()]


if __name__ == "__main__":
    main()
