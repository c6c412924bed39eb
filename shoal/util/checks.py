"""Health checks of the ``doctor`` commands: one line each, and exit status 10 if one fails.

Example: ``checked("disk", check)`` is a failure with the error's text and hint if ``check`` raises a `ShoalError`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from shoal.errors import ShoalError, reason_of
from shoal.util.console import say, say_json

EXIT_UNHEALTHY: Final = 10
"""Exit status of a program that has found a failure; nothing is wrong with the call itself."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: one word.
        result: ``warning`` if everything works, but may not for long or not as well as it could.
        detail: the finding.
        advice: the next step for the operator; empty if absent.
    """

    name: str
    result: Literal["ok", "warning", "failure"]
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Check:
    """Return a check that has found nothing wrong."""
    return Check(name, "ok", detail)


def checked(name: str, check: Callable[[], Check]) -> Check:
    """Return the result of ``check``; a failure if it raises an expected error."""
    try:
        return check()
    except ShoalError as error:
        return Check(name, "failure", reason_of(error), error.hint)


def report(checks: Sequence[Check], *, as_json: bool) -> None:
    """Print the checks, then end the program with EXIT_UNHEALTHY if one has failed.

    Raises:
        SystemExit: a check has failed.
    """
    if as_json:
        say_json({"checks": [dataclasses.asdict(check) for check in checks]})
    else:
        for check in checks:
            say(f"{check.result:7}  {check.name}: {check.detail}")
            if check.advice:
                say(f"         hint: {check.advice}")
    if any(check.result == "failure" for check in checks):
        sys.exit(EXIT_UNHEALTHY)
