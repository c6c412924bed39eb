"""``live.json`` in the aggregator's directory: the daemon's facts for other processes.

The daemon replaces the file when its facts have changed, at most every WRITE_EVERY_S seconds however busy the fleet is, in a
large fleet every MOST_PAUSE_S, and at once when its connection or its run changes. It sets the file's time of modification every
ALIVE_EVERY_S seconds: after a crash that time says how long the daemon was alive. The file is not synced to the disk: after a
power cut it may be missing, which is no error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aggregator.status.facts import DeviceStatus, LiveFacts, RunStatus
from aggregator.status.record import ALIVE_EVERY_S
from shoal.errors import ConfigError, DocumentError, ShoalError, reason_of
from shoal.util.files import write_atomic
from shoal.util.state_codec import decode_state, encode_state
from shoal.version import VERSION, WIRE

if TYPE_CHECKING:
    from aggregator.status.watch import FleetWatch

LOG = logging.getLogger("shoal.aggregator")
LIVE_FILE: Final = "live.json"
WRITE_EVERY_S: Final = 2.0
MOST_PAUSE_S: Final = 8.0
PAUSE_PER_COST: Final = 100.0
"""Pauses are at least this many times as long as the last write took, up to MOST_PAUSE_S: for 500 devices a write takes 6 ms."""


def read_live(directory: Path) -> LiveFacts | None:
    """Return the facts that the last daemon wrote; None if there are none, or the file can't be read."""
    path = directory / LIVE_FILE
    try:
        with path.open("rb") as file:
            facts = decode_state(LiveFacts, json.load(file), mixed=True)
            return dataclasses.replace(facts, alive_at_s=int(os.fstat(file.fileno()).st_mtime))
    except (OSError, ValueError, RecursionError, DocumentError):
        return None  # damaged: the next start replaces it


def known_devices(directory: Path) -> Mapping[str, DeviceStatus]:
    """Return the facts of the devices that the last daemon wrote; empty without any."""
    live = read_live(directory)
    return {} if live is None else live.devices


class LiveFile:
    """Writes the file. A failure to write is logged once, and never ends the daemon.

    Args:
        directory: the aggregator's.
        watch: the facts about the broker and the devices; also the clock.
    """

    def __init__(self, directory: Path, watch: FleetWatch) -> None:
        self._path = directory / LIVE_FILE
        self._watch = watch
        self._written: LiveFacts | None = None
        self._looked_s = self._alive_s = -math.inf
        self._failed = False
        self._pause_s = WRITE_EVERY_S

    def keep_up(self, run: Callable[[], RunStatus | None], now_s: float) -> None:
        """Write the facts if they have changed and that is due.

        Args:
            run: returns the facts of the run that is served; called only when a look is due.
            now_s: monotonic seconds.
        """
        if now_s - self._looked_s < self._pause_s:
            return
        self._looked_s = now_s
        began_s = time.monotonic()
        facts = self.facts(run())
        if facts != self._written:
            self._write(facts)
            cost_s = time.monotonic() - began_s
            self._pause_s = min(MOST_PAUSE_S, max(WRITE_EVERY_S, PAUSE_PER_COST * cost_s))
            self._alive_s = now_s
        elif now_s - self._alive_s >= ALIVE_EVERY_S:
            self._alive_s = now_s
            self._touch()

    def hurry(self) -> None:
        """Let the next `keep_up` look at once: the connection has changed, or another run is served."""
        self._looked_s = -math.inf

    def end(self, error: BaseException | None) -> None:
        """Write that the daemon ends: because it was asked to, or because of ``error``."""
        hint = error.hint if isinstance(error, ShoalError) else ""
        reason = "" if error is None else reason_of(error)
        self._write(dataclasses.replace(self.facts(None), ended_at_s=int(self._watch.clock()), error=reason, hint=hint))

    def facts(self, run: RunStatus | None) -> LiveFacts:
        """Return the daemon's facts now.

        Args:
            run: those of the run that is served; None if none is.
        """
        return LiveFacts(
            version=VERSION,
            wire=WIRE,
            connection=self._watch.connection.facts,
            devices=self._watch.devices.devices,
            run=run,
        )

    def _write(self, facts: LiveFacts) -> None:
        self._written = facts
        try:
            write_atomic(self._path, json.dumps(encode_state(facts).document).encode(), durable=False)
        except (ConfigError, OSError) as error:
            self._written = None  # try again when a look is due
            self._complain(error)
        else:
            self._failed = False

    def _touch(self) -> None:
        try:
            os.utime(self._path)
        except OSError as error:
            self._written = None  # it was removed: write it again
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._failed:
            LOG.warning("the facts for status can't be written", extra={"kv": {"reason": reason_of(error)}})
        self._failed = True
