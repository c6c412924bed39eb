"""The engine alone, part of `shoal bench aggregator`: microseconds for each presence and each upload of a round.

No message, seal or disk takes part. The times of a small and of a large fleet are about the same, since no event of the
engine looks at all devices.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Final

from aggregator.rounds.engine import Engine
from aggregator.rounds.events import CameOnline, Stored
from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.registry import make_strategy
from shoal.errors import UsageError
from shoal.protocol.documents import RunPlan
from shoal_lab.bench.load.aggregator import KEY_ID, Crowd

FLEETS: Final = (300, 10_000)
DIGEST: Final = bytes(32)


def measure_engine(algorithm: str) -> list[dict[str, Any]]:
    """Return the engine's times for fleets of `FLEETS` devices, as `--json` prints them."""
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder:
        crowd = Crowd(Path(folder), 1, algorithm)
        crowd.close()
    return [_times(crowd.plan, devices) for devices in FLEETS]


def _times(plan: RunPlan, devices: int) -> dict[str, Any]:
    engine = Engine(plan, make_strategy(plan), bytes(16))
    names = tuple(f"dev-{i:05}" for i in range(devices))
    state, _ = engine.begin(names)
    begin = time.process_time()
    for name in names[:-1]:
        state, _ = engine.handle(state, CameOnline(name))
    presences_s = time.process_time() - begin
    state, _ = engine.handle(state, CameOnline(names[-1]))
    if state.plan is None:
        raise UsageError("round 1 did not open")
    # All but the last: that one closes the round, which is the strategy's work and not the engine's.
    uploads = [
        Stored(
            ClientUpdate(
                round=1,
                phase=assignment.phase,
                device=name,
                model=assignment.candidates[0],
                samples=10,
                loss=1.0,
                key_id=KEY_ID,
            ),
            DIGEST,
        )
        for name, assignment in list(state.plan.assignments.items())[:-1]
    ]
    begin = time.process_time()
    for upload in uploads:
        state, _ = engine.handle(state, upload)
    uploads_s = time.process_time() - begin
    return {
        "devices": devices,
        "us_per_presence": 1e6 * presences_s / len(names),
        "us_per_upload": 1e6 * uploads_s / max(1, len(uploads)),
    }
