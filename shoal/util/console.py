"""How every program speaks: data on stdout, the rest on stderr, one JSON object with --json, no traceback without --debug."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

from shoal.errors import ConfigError, ShoalError, UsageError
from shoal.util import telemetry

if TYPE_CHECKING:
    from typer import Typer

DISTRIBUTION: Final = "shoal"
SCHEMA: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
LEVELS: Final = ("debug", "info", "warning", "error")
_COLOURS: Final = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}


class OutputError(ConfigError):
    """What the program has to say can't be written."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"can't write the output: {reason}", hint="check where the output goes, and the space left there"
        )


def say(text: str = "") -> None:
    """Print a line of data to stdout.

    Raises:
        OutputError: it can't be written; BrokenPipeError where nobody reads it any more.
    """
    out: TextIO | None = sys.stdout  # None where the program was started with a closed one
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
    """Print a line about the work to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def note_error(error: ShoalError) -> None:
    """Print an error and its hint to stderr."""
    note(f"error: {error}")
    if error.hint:
        note(f"hint: {error.hint}")


def counted(number: int, thing: str) -> str:
    """Return "1 round", "2 rounds"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def say_json(data: Any) -> None:
    """Print the one JSON object of a ``--json`` call: {"schema", "ok", "data"}."""
    say(json.dumps({"schema": SCHEMA, "ok": True, "data": data}, allow_nan=False))


def colour_wanted(stream: Any) -> bool:
    """Whether ``stream`` is a terminal whose person has not set NO_COLOR."""
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
    """Send the root logger to stderr at ``level``, one of LEVELS.

    Raises:
        UsageError: it is another.
    """
    if level.lower() not in LEVELS:
        raise UsageError(f"there is no log level {level!r}", hint=f"one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter(terminal=colour_wanted(sys.stderr)))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def no_core_dumps() -> None:
    """Forbid core files: they would hold keys."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def forbid_inspection() -> None:
    """Make this process unreadable to other processes of its user (PR_SET_DUMPABLE 0): devices and the owner hold the mask."""
    import ctypes

    pr_set_dumpable = 4
    if ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0):
        raise OSError("this system can't keep other processes from reading our memory")


def add_version(app: Typer, *, prog: str) -> None:
    """Give a typer application the option --version."""
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
    ) -> None: ...


def run_program(app: Callable[..., Any], *, prog: str, secret: bool = False) -> NoReturn:
    """Run a typer application as a program: errors become one line and a hint, with the exit code of their class.

    It leaves no core file, whatever it is; with ``secret``, because it will hold a mask secret or the owner's key, other
    processes of its user can't read its memory either.
    """
    telemetry.switch_off()  # also for what libraries import, and for programs that this one starts
    no_core_dumps()
    if secret:
        forbid_inspection()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments or os.environ.get("SHOAL_DEBUG") == "1"
    if "--debug" in arguments:
        sys.argv.remove("--debug")
    try:
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
        # typer turns both into exits of its own.
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
    """Whether it came from typer's ``echo``, which prints the help by itself."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)][-1:] == ["echo"]


def _report_bug(error: Exception) -> None:
    note(f"error: unexpected {type(error).__name__}: {error}")
    note("hint: this is a bug; run again with --debug to see where")


def _forget_output() -> None:
    """Keep the interpreter from trying to write, at its end, what can't be written."""
    out: TextIO | None = sys.stdout
    if out is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _leave_quietly() -> NoReturn:
    """End because whoever read our output has gone. SIGPIPE itself stays ignored: a dead broker must not end a daemon."""
    _forget_output()
    sys.exit(EXIT_BROKEN_PIPE)


def _report(error: ShoalError, *, as_json: bool) -> None:
    if as_json:
        failure = {"type": type(error).__name__, "message": str(error), "hint": error.hint}
        try:
            say(json.dumps({"schema": SCHEMA, "ok": False, "error": failure}))
        except (OutputError, BrokenPipeError):
            _forget_output()  # what went wrong first is the news, and stderr has it
    if isinstance(error, OutputError):
        _forget_output()
    note_error(error)
