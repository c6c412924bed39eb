"""The device's side of own training code: a process that is begun when it is first asked, and anew after each failure."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from edge_client.learning.trainer.messages import (
    MAX_ANSWER_BYTES,
    Answer,
    Area,
    Request,
    packet_of,
    parse_answer,
    views,
)
from edge_client.learning.training import Cancelled
from shoal.errors import TrainerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.executor.choice import TrainerCommand

POLL_S: Final = 0.2
"""How often the device looks whether it still needs an answer."""
END_S: Final = 2.0
"""How long a process that has closed its connection may take to end; a busy machine needs more than a moment."""
PASSED_ON: Final = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Names in the environment that own code has. Others may hold a secret, such as a broker's password."""
PASSED_ON_BEGINNINGS: Final = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "TORCH_", "HF_", "TRAINER_")
"""Beginnings of further names that it has."""

LOG_HINT: Final = "what it wrote is in this program's log, on stderr"


class TrainerProcess:
    """One process of own code, for one thread.

    Args:
        command: what to run, and its limits.
    """

    def __init__(self, command: TrainerCommand) -> None:
        self._command = command
        self._link: socket.socket | None = None
        self._end: Callable[[], Any] = lambda: None

    @property
    def runs(self) -> bool:
        """Whether the process has begun and has not failed."""
        return self._link is not None

    def ask(
        self, request: Request, inputs: Sequence[NDArray[Any]], cancelled: Callable[[], bool]
    ) -> tuple[Answer, NDArray[Any]]:
        """Return the answer to a request, and a copy of its result.

        Args:
            request: its last area is the result's, and the other ones the inputs'; or the first one is both.
            inputs: the arrays that the areas describe, in their order.
            cancelled: called while the process works; when it returns true the process ends.

        Raises:
            Cancelled: ``cancelled()`` returned true.
            TrainerError: own code raised, ended, took too long, or gave no sensible answer. The process has ended.
        """
        if self._link is None:
            self._begin()
        assert self._link is not None
        descriptor, arrays = _shared(request.areas)
        try:
            for array, values in zip(arrays, inputs, strict=False):
                array[...] = values
            socket.send_fds(self._link, [packet_of(request)], [descriptor])
            answer = parse_answer(self._received(self._link, cancelled))
            if answer.error:
                raise TrainerError(f"the trainer failed: {answer.error}", hint=LOG_HINT)
        except OSError as error:
            self.end()
            raise TrainerError(f"the trainer's process can't be asked: {error.strerror or error}") from None
        except BaseException:
            self.end()
            raise
        finally:
            os.close(descriptor)
        return answer, arrays[0 if request.action == "train" else -1].copy()

    def end(self) -> None:
        """Kill the process, if there is one."""
        self._end()
        self._link = None

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, limit = self._command, self._command.memory_bytes
        program = (sys.executable, "-P", "-u", "-m", "edge_client.learning.trainer.child")
        try:
            process = subprocess.Popen(
                (*program, command.spec, str(theirs.fileno()), str(limit)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what own code prints goes to the device's log
                env=own_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise TrainerError(f"the trainer's process can't be started: {error.strerror}") from None
        finally:
            theirs.close()
        ours.settimeout(POLL_S)
        self._link, self._process = ours, process
        self._end = weakref.finalize(self, _kill, process, ours)

    def _received(self, link: socket.socket, cancelled: Callable[[], bool]) -> bytes:
        due_s = time.monotonic() + self._command.most_s
        while True:
            try:
                packet = link.recv(MAX_ANSWER_BYTES + 1)
            except TimeoutError:
                if cancelled():
                    raise Cancelled("the trainer was stopped") from None
                if time.monotonic() >= due_s:
                    raise TrainerError(
                        f"the trainer has not answered for {self._command.most_s:g} seconds",
                        hint="does it hang? --trainer-s allows more",
                    ) from None
                continue
            except ConnectionError:
                packet = b""
            if packet:
                return packet
            raise TrainerError(f"the trainer's process {_ended(self._process)}", hint=LOG_HINT)


def own_environment() -> dict[str, str]:
    """Return the environment of an operator's program: this process's, without all that may hold a secret."""
    return {n: v for n, v in os.environ.items() if n in PASSED_ON or n.startswith(PASSED_ON_BEGINNINGS)}


def _shared(areas: Sequence[Area]) -> tuple[int, list[NDArray[Any]]]:
    """Return the descriptor of new memory and an array in it for each area. Its size is fixed: who cuts it kills nobody."""
    descriptor = os.memfd_create("shoal-trainer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, max(1, sum(area.room for area in areas)))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, views(mmap.mmap(descriptor, 0), areas)


def _kill(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    """End the process and those that it has begun, such as torch's data loaders: they are one group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    link.close()


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Return how a process that has closed its socket has ended."""
    try:
        return how_it_ended(process.wait(END_S))
    except subprocess.TimeoutExpired:
        return "closed its connection"


def how_it_ended(status: int) -> str:
    """Return how a process has ended, given its exit status, or minus the signal."""
    if status < 0:
        return f"was ended by signal {-status}{', as the kernel does where memory is short' if status == -9 else ''}"
    return f"ended with status {status}"
