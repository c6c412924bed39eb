"""Console conventions of all programs: data on stdout, the rest on stderr, --json for one JSON object, --debug for tracebacks.

Times are shown in UTC.

The ``doctor`` commands show a line for each `Check`, with exit status 10 if one fails. Example: ``checked("disk", check)`` is a
failure with the error's text and hint if ``check`` raises a `ShoalError`.

`working` tells how long an operation takes: ``with working("compiling the task"): ...`` prints nothing for two seconds, and then
``compiling the task: 2 s``, ``compiling the task: 7 s`` and so on to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, TextIO

from shoal.errors import ConfigError, ShoalError, UsageError, reason_of
from shoal.util import telemetry
from shoal.util.own_packages import DISTRIBUTION, check_packages

if TYPE_CHECKING:
    from typer import Typer


def day(at_s: int) -> str:
    """Return the date of a unix time in seconds, UTC: 2026-11-22."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def span(seconds: int) -> str:
    """Return a time span in its two largest units: 45 s, 7 min, 2 h 5 min, 3 d 4 h."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        parts = [f"{days} d", f"{hours % 24} h" if hours % 24 else ""]
    elif hours:
        parts = [f"{hours} h", f"{minutes % 60} min" if minutes % 60 else ""]
    else:
        parts = [f"{minutes} min" if minutes else f"{seconds} s"]
    return " ".join(part for part in parts if part)


def second(at_s: int) -> str:
    """Return unix seconds in ISO 8601, UTC: 2026-11-22T16:27:10Z; a time out of `time.gmtime`'s range as the number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
    except (OverflowError, OSError, ValueError):
        return f"second {at_s}"


SCHEMA: Final = 1
# 128 plus the number of SIGINT or SIGPIPE, as shells report a program that the signal has ended.
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
LEVELS: Final = ("debug", "info", "warning", "error")
_COLOURS: Final = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


class OutputError(ConfigError):
    """The program's output can't be written."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"can't write the output: {reason}", hint="check the output's destination and the space left there"
        )


def say(text: str = "") -> None:
    """Print a line of data to stdout.

    Raises:
        OutputError: the line can't be written.
        BrokenPipeError: the reader of stdout has gone.
    """
    out: TextIO | None = sys.stdout  # None if the program was started with stdout closed
    if out is None:
        raise OutputError("stdout is closed")
    try:
        out.write(text + "\n")
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


def note(text: str) -> None:
    """Print a line for people, such as progress or a next step, to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def note_error(error: ShoalError) -> None:
    """Print an error and its hint to stderr."""
    note(f"error: {error}")
    if error.hint:
        note(f"hint: {error.hint}")


def mask_words(mode: str) -> str:
    """Return a mask mode as programs print it: its name and, for a rotation, what the secret is.

    Example: ``mask_words("rotation")`` is "rotation (secret permutation, signs, Hadamard)".
    """
    return f"{mode} (secret permutation, signs, Hadamard)" if mode == "rotation" else mode


def counted(number: int, thing: str) -> str:
    """Return "1 round", "2 rounds"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def say_json(data: Any) -> None:
    """Print the one JSON object of a ``--json`` call: {"schema", "ok", "data"}."""
    # JSON has no NaN, so an error here is better than output that other programs can't parse.
    say(json.dumps({"schema": SCHEMA, "ok": True, "data": data}, allow_nan=False))


def say_result(data: Any, *lines: str, as_json: bool) -> None:
    """Print what a command has found: ``data`` as the one JSON object of ``--json``, else the lines for people."""
    if as_json:
        say_json(data)
        return
    for line in lines:
        say(line)


def colour_wanted(stream: Any) -> bool:
    """Return whether ``stream`` is a terminal and NO_COLOR is not set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


class LogfmtFormatter(logging.Formatter):
    """``ts=... level=... logger=... msg="..." key=value``; coloured level and no timestamp on a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; values given as ``extra={"kv": {...}}`` become key=value."""
        pairs: dict[str, Any] = getattr(record, "kv", {})
        tail = "".join(f" {k}={_value(v)}" for k, v in pairs.items())
        message = record.getMessage()
        if record.exc_info:
            message += f": {record.exc_info[1]}"
        if self.terminal:
            return f"\x1b[{_COLOURS.get(record.levelname, '0')}m{record.levelname.lower():7}\x1b[0m {message}{tail}"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"ts={stamp}Z level={record.levelname.lower()} logger={record.name} msg={json.dumps(message)}{tail}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "=') else text


def setup_logging(level: str) -> None:
    """Send the root logger to stderr at ``level``.

    Raises:
        UsageError: ``level`` is not one of LEVELS.
    """
    if level.lower() not in LEVELS:
        raise UsageError(f"there is no log level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter(terminal=colour_wanted(sys.stderr)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def no_core_dumps() -> None:
    """Disable core files, which would contain keys."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forbid_inspection() -> None:
    """Make this process unreadable to other processes of its user (PR_SET_DUMPABLE 0), since it holds secrets.

    Raises:
        OSError: the system refuses.
    """
    import ctypes

    pr_set_dumpable = 4
    if ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0):
        raise OSError("this system can't keep other processes from reading our memory")


def add_version(app: Typer, *, prog: str) -> None:
    """Give a typer application the options --version and --debug; `run_program` takes the second from the command line."""
    from typer import Exit, Option

    def show(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import PackageNotFoundError, version

            try:
                say(f"{prog} {version(DISTRIBUTION)}")
            except PackageNotFoundError:
                say(f"{prog}, run from its source without being installed")
            raise Exit

    @app.callback()
    def root(
        version: bool = Option(False, "--version", help="Print the version.", is_eager=True, callback=show),
        debug: bool = Option(
            False, "--debug", help="Show the traceback of an error; at any place of the command line."
        ),
    ) -> None: ...


def run_program(app: Callable[..., Any], *, prog: str, secret: bool = False) -> NoReturn:
    """Run a typer application as a program: an error becomes one line and a hint, with the exit code of its class.

    Core files are disabled. With ``secret``, for programs that hold a mask secret or the owner's key, other processes of the
    same user can't read this one's memory either.
    """
    telemetry.switch_off()  # before any library imports ONNX Runtime; child processes inherit it
    no_core_dumps()
    if secret:
        forbid_inspection()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments or os.environ.get("SHOAL_DEBUG") == "1"
    if "--debug" in arguments:
        sys.argv.remove("--debug")
    try:
        check_packages()
        app(prog_name=prog)
    except ShoalError as error:
        if debug:
            traceback.print_exc()
        _report(error, as_json="--json" in arguments)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as end:
        # typer turns BrokenPipeError and KeyboardInterrupt into SystemExit.
        if isinstance(end.__context__, BrokenPipeError):
            _leave_quietly()
        if isinstance(end.__context__, KeyboardInterrupt) or isinstance(
            getattr(end.__context__, "__cause__", None), KeyboardInterrupt
        ):
            note("interrupted")
            sys.exit(EXIT_INTERRUPTED)
        raise
    except BrokenPipeError:
        _leave_quietly()
    except Exception as error:
        if isinstance(error, OSError) and _was_printing(error):
            unwritten = OutputError(error.strerror or str(error))
            _report(unwritten, as_json=False)
            sys.exit(unwritten.exit_code)
        if debug:
            raise
        _report_bug(error)
        sys.exit(1)
    sys.exit(0)


def _was_printing(error: OSError) -> bool:
    """Return whether ``error`` was raised in typer's ``echo``, which prints the help without `say`."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)][-1:] == ["echo"]


def _report_bug(error: Exception) -> None:
    note(f"error: unexpected {type(error).__name__}: {error}")
    note("hint: this is a bug; run again with --debug to see where")


def _forget_output() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's flush at exit can't fail again."""
    out: TextIO | None = sys.stdout
    if out is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _leave_quietly() -> NoReturn:
    """Exit silently after the reader of stdout has gone, as a program that SIGPIPE ends would.

    SIGPIPE itself stays ignored, because a closed connection to the broker must not end a daemon.
    """
    _forget_output()
    sys.exit(EXIT_BROKEN_PIPE)


def _report(error: ShoalError, *, as_json: bool) -> None:
    if as_json:
        failure = {"type": type(error).__name__, "message": str(error), "hint": error.hint}
        try:
            say(json.dumps({"schema": SCHEMA, "ok": False, "error": failure}))
        except (OutputError, BrokenPipeError):
            _forget_output()  # the first error matters more, and is on stderr
    if isinstance(error, OutputError):
        _forget_output()
    note_error(error)


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
        say_json({"checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            say(f"{check.result:7}  {check.name}: {check.detail}")
            if check.advice:
                say(f"         hint: {check.advice}")
    if any(check.result == "failure" for check in checks):
        sys.exit(EXIT_UNHEALTHY)


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
