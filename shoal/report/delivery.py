"""Options that the commands of `shoal` share, and the delivery of their figures: saved, drawn and printed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import ShoalError, UsageError
from shoal.report import record
from shoal.util.console import note_error, say_json


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return ``path``, where a file can be written: see `record.check_place`."""
    if path is not None:
        record.check_place(path, option.opts[0])
    return path


SaveFile = Annotated[
    Path | None,
    typer.Option(
        help="Also write the figures to this file, with command, commit and machine; a .jsonl file keeps other runs.",
        dir_okay=False,
        callback=writable,
    ),
]
HtmlFile = Annotated[
    Path | None, typer.Option(help="Also write a page with pictures to this file.", dir_okay=False, callback=writable)
]
BrokerName = Annotated[str, typer.Option(help="auto, mosquitto or amqtt.")]


def broker_name(name: str) -> Any:
    """Return the name of a broker that can be started.

    Raises:
        UsageError: it is none.
    """
    if name not in ("auto", "mosquitto", "amqtt"):
        raise UsageError(f"no broker {name!r}", hint="use auto, mosquitto or amqtt")
    return name


def deliver(
    data: dict[str, Any], json: bool, show: Callable[[], None], save: Path | None, *writes: Callable[[], None]
) -> None:
    """Save the figures, write what belongs to them, and print them, as one JSON object or with ``show``.

    What fails prevents nothing else: figures of hours are printed though their file or their drawing can't be written.

    Raises:
        typer.Exit: saving or writing failed, with the first error's exit code, after printing.
    """
    failures: list[ShoalError] = []
    saves = () if save is None else (lambda: record.save(save, data),)
    for write in (*saves, *writes):
        try:
            write()
        except ShoalError as error:
            failures.append(error)
    if json:
        say_json(data)
    else:
        show()
    for failure in failures:
        note_error(failure)
    if failures:
        raise typer.Exit(failures[0].exit_code)


def stop_cleanly() -> None:
    """Handle SIGTERM like Ctrl-C, so that every process that was started is ended."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
