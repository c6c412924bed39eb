"""What the aggregator says on its log about a run: what it waits for, and what a round brought."""

from __future__ import annotations

import logging
from typing import Final

from aggregator.engine_state import EngineState
from aggregator.events import RoundRecord

LOG = logging.getLogger("shoal.aggregator")
NAMES_SHOWN: Final = 5


def waiting_for(state: EngineState) -> str:
    """Return one line: what the run is waiting for."""
    if state.plan is None and state.roster is not None and state.roster.keys_since > state.newest:
        return f"round {state.round}: the owner has replaced the keys, and the newer ones have not come yet"
    if state.plan is None and state.roster is not None and state.roster.keys_since < state.newest:
        return (
            f"round {state.round}: the owner has replaced the keys, and the roster that goes with them has not come yet"
        )
    if state.plan is None and state.rollover is not None:
        return f"round {state.round}: more than half of the roster must be here to end the mask epoch"
    if state.plan is None:
        absent = [d for d in state.devices if d not in state.online]
        there = len(state.devices) - len(absent)
        return f"gathering: {there} of {len(state.devices)} devices are here{_names(absent)}"
    done, total = len(state.received), len(state.plan.orders)
    what = f"round {state.round}"
    if state.rollover is not None:
        what = f"{what}, {'folding' if state.rollover.proposal is None else 'signing'} the next mask epoch"
    return f"{what}: {done} of {total}{_names(list(state.waiting))}"


def report(run: int, record: RoundRecord, seconds: float, bytes_up: int) -> None:
    """Log a round that closed and what happened in it."""
    r = record
    sizes = sorted((list(r.clusters.values()).count(c) for c in set(r.clusters.values())), reverse=True)
    pairs = {
        "run": run,
        "round": r.round,
        "devices": f"{r.contributed}/{r.ordered}",
        "loss": r.loss,
        "cluster_sizes": "+".join(map(str, sizes)),
        "dur_s": seconds,
        "bytes": bytes_up,
    }
    if r.tested:
        pairs["accuracy"] = r.correct / r.tested
    LOG.info("round closed", extra={"kv": pairs})
    for event in r.events:
        LOG.info(str(event["kind"]), extra={"kv": {k: v for k, v in event.items() if k not in ("kind",)}})


def _names(devices: list[str]) -> str:
    if not devices:
        return ""
    shown = ", ".join(devices[:NAMES_SHOWN])
    more = f" and {len(devices) - NAMES_SHOWN} more" if len(devices) > NAMES_SHOWN else ""
    return f", waiting for {shown}{more}"
