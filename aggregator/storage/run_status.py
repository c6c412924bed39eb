"""What others may ask of a run's directory while the store writes it."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

from aggregator.storage import records
from aggregator.storage.corruption import is_system_failure, readable
from aggregator.storage.store import BUSY_TIMEOUT_MS, DATABASE, SnapshotHead, check_version
from shoal.errors import ConfigError, text_of
from shoal.util.files import write_atomic
from shoal.util.state_codec import decode_state

WAITING_FILE: Final = "waiting.json"
"""Written while an open round waits, for `status` alone: a line, and after the deadline who is missing and what to do."""
LOG = logging.getLogger("shoal.aggregator")
R = TypeVar("R")


def read_generation(directory: Path) -> int | None:
    """Return the newest secrets, by the roster sequence they were drawn at, that a run has turned to; None for the first."""
    found = _read(directory, lambda reader: reader.execute("SELECT head FROM snapshot").fetchone())
    if found is None:
        return None
    with readable(directory):
        return decode_state(SnapshotHead, json.loads(found[0])).metadata.newest_generation


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the closed rounds of a run that another process may be writing; empty where there are none yet."""
    return _read(directory, records.read) or []


def read_last_record(directory: Path) -> dict[str, Any] | None:
    """Return the last closed round of a run that another process may be writing; None where there is none yet."""
    return _read(directory, records.read_last)


def rounds_closed(directory: Path) -> int:
    """Return the number of the last closed round of a run that another process may be writing; 0 before the first."""
    last = read_last_record(directory)
    return 0 if last is None else int(last["round"])


def uploads_stored(directory: Path, round_: int) -> int:
    """Return how many uploads of a round are durable in a run that another process may be writing."""
    counting = "SELECT COUNT(*) FROM uploads WHERE round = ?"
    found = _read(directory, lambda reader: reader.execute(counting, (round_,)).fetchone())
    return int(found[0]) if found else 0


def read_plan(directory: Path) -> bytes | None:
    """Return the run plan, encoded, that a run's directory was made for; None where no run has begun there."""
    found = _read(directory, lambda reader: reader.execute("SELECT value FROM facts WHERE name = 'plan'").fetchone())
    return None if found is None else found[0]


def keep_waiting(directory: Path, line: str, figures: dict[str, Any] | None = None) -> None:
    """Write for `status` what the run waits for; remove that where it goes on. A full disk only prevents it."""
    path = directory / WAITING_FILE
    try:
        if line:
            write_atomic(path, json.dumps({"line": line, "shortage": figures or None}).encode(), durable=False)
        else:
            path.unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
        LOG.warning("status can't tell what the run waits for", extra={"kv": {"reason": error}})


def forget_waiting(root: Path) -> None:
    """Remove what an aggregator that was killed has left in the runs below its directory."""
    for path in root.glob(f"run-*/{WAITING_FILE}"):
        keep_waiting(path.parent, "")


def read_waiting(directory: Path) -> tuple[str, dict[str, Any] | None]:
    """Return what a run that is served waits for, empty where it goes on; and who is missing once the deadline has passed."""
    try:
        kept = json.loads((directory / WAITING_FILE).read_bytes())
        return str(kept["line"]), kept["shortage"]
    except FileNotFoundError:
        return "", None
    except OSError as error:
        return text_of(error), None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{directory / WAITING_FILE} is damaged: {text_of(error)}", None


def _read(directory: Path, query: Callable[[sqlite3.Connection], R]) -> R | None:
    """Return what ``query`` finds in a run's database that another process may be writing; None before it has tables.

    Raises:
        IntegrityError: the database is damaged, or of another version.
    """
    path = directory / DATABASE
    if not path.exists():
        return None
    with (
        readable(directory),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as reader,
    ):
        try:
            reader.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            check_version(reader, directory)
            return query(reader)
        except sqlite3.OperationalError as error:
            if is_system_failure(error):
                raise
            return None  # the writer has not made its tables yet
