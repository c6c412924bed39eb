"""Objects that a ``with`` statement closes."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """An object that is closed at the end of its ``with`` statement."""

    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
