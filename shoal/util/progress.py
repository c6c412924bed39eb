"""Progress lines for long operations.

Example: ``with working("compiling the task"): ...`` prints nothing for two seconds, and then
``compiling the task: 2 s``, ``compiling the task: 7 s`` and so on to stderr.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

from shoal.util.console import note

AFTER_S: Final = 2.0
"""Time to the first line."""
EVERY_S: Final = 5.0
"""Time between two lines."""


class working:  # noqa: N801 - used as a statement, like contextlib's
    """A context that prints lines of progress while its body runs.

    Args:
        what: the work in words, such as "compiling the task".
        after_s: seconds to the first line; every_s: seconds between two.
    """

    def __init__(self, what: str, *, after_s: float = AFTER_S, every_s: float = EVERY_S) -> None:
        self._what = what
        self._after_s, self._every_s = after_s, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def _tell(self) -> None:
        began_s, pause_s = time.monotonic(), self._after_s
        while not self._over.wait(pause_s):
            note(f"{self._what}: {time.monotonic() - began_s:.0f} s")
            pause_s = self._every_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
