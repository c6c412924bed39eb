"""A fleet page without a fleet: records of rounds made by hand in a real store, and the facts that a daemon would publish."""

from __future__ import annotations

import base64
import dataclasses
import json
import time

import numpy as np

from aggregator.page.access import Access, Listen
from aggregator.page.feed import Feed
from aggregator.page.metrics import Metrics
from aggregator.page.server import PageServer
from aggregator.status.facts import ConnectionFacts, DeviceStatus, LiveFacts, RunStatus
from aggregator.status.record import Facts
from aggregator.storage.store import Store
from tests.helpers.plans import run_plan

BROKER = "mqtts://reef.example:8883"
NOW_S = 1_800_000_000


def embedded(page):
    """Return the data that a page carries."""
    text = page.decode().partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def names(count):
    return tuple(f"dev-{i:03d}" for i in range(count))


def clusters_at(round_, devices):
    """Return device -> cluster: one cluster, two from round 6, four from round 14."""
    if round_ < 6:
        return dict.fromkeys(devices, 0)
    if round_ < 14:
        return {d: 1 + i % 2 for i, d in enumerate(devices)}
    return {d: 3 + i % 4 for i, d in enumerate(devices)}


def cosines_of(devices, round_, shown=48):
    """Return cosines in which devices of one group of four are alike."""
    rng = np.random.default_rng(round_)
    ordered = sorted(devices, key=lambda d: (int(d[-3:]) % 4, d))
    chosen = [ordered[i * len(ordered) // shown] for i in range(shown)] if len(ordered) > shown else ordered
    group = np.array([int(d[-3:]) % 4 for d in chosen])
    values = np.where(group[:, None] == group[None, :], 70, -20) + rng.integers(-15, 16, (len(chosen), len(chosen)))
    above = values[np.triu_indices(len(chosen), 1)].astype(np.int8)
    return {"devices": chosen, "hundredths": base64.b64encode(above.tobytes()).decode()}


def record(round_, devices, *, final=False, missing=(), **changes):
    """Return the record of a round, as a store returns it."""
    clusters = clusters_at(round_, devices)
    there = [d for d in devices if d not in missing]
    loss = 0.2 + 1.5 / (1 + round_)
    ids = sorted(set(clusters.values()))
    tests = {str(c): [int(100 * (1 - loss / 3)) + c, 120] for c in ids}
    return {
        "round": round_,
        "final": final,
        "ordered": len(devices),
        "contributed": len(there),
        "missing": list(missing),
        "loss": loss,
        "correct": sum(t[0] for t in tests.values()),
        "tested": sum(t[1] for t in tests.values()),
        "norms": dict.fromkeys(there, 1.5),
        "clusters": clusters,
        "events": [{"round": round_, "kind": "split", "cluster": 0, "children": [1, 2]}] if round_ == 6 else [],
        "device_accuracy": {d: [3, 4] for d in there},
        "declined": {},
        "capped": {},
        "refused_norm": {},
        "out_of_step": {},
        "still": [],
        "cluster_losses": {str(c): loss + 0.01 * c for c in ids},
        "cluster_tests": tests,
        "cosines": None if final else cosines_of(devices, round_),
        "seconds": 1.0 + 0.05 * (round_ % 5),
        "bytes_up": 31_400 * len(there),
        **changes,
    }


def facts(devices, round_, *, received=0, connected=True, changes=None, run=1, computing=False):
    """Return the facts of a daemon whose run has opened ``round_``; ``changes`` has a device's fields unlike a healthy one's."""
    healthy = DeviceStatus(name="", online=True, since_s=NOW_S, last_seen_s=NOW_S, last_upload_s=NOW_S, version="0.1.0")
    known = {d: dataclasses.replace(healthy, name=d, **(changes or {}).get(d, {})) for d in devices}
    waiting = tuple(devices[received:])
    open_run = RunStatus(
        run=run,
        algorithm="cfl",
        rounds=60,
        phase="round",
        round=round_,
        since_s=NOW_S,
        deadline_at_s=NOW_S + 60,
        quorum=len(devices),
        received=received,
        waiting=waiting,
        computing=computing,
    )
    reason = "" if connected else "the broker closed the connection"
    connection = ConnectionFacts(broker=BROKER, connected=connected, since_s=NOW_S, reason=reason)
    return LiveFacts(version="0.1.0", connection=connection, devices=known, run=open_run)


class PagePlace:
    """A feed and its server over a store of handmade rounds.

    Args:
        root: an empty directory.
        devices: their names.
        token: of the server; none if empty.
        fleet: its name.
    """

    def __init__(self, root, devices, token=b"", fleet="reef", rounds=60):
        self.devices = devices
        self.plan = run_plan("cfl", fleet=fleet, rounds=rounds)
        self.store = Store(root / "run-000001", self.plan)
        self.feed = Feed(fleet, root, lambda run: root / f"run-{run:06d}")
        self.metrics = Metrics(self.feed)
        access = Access(Listen("127.0.0.1", 0), token)
        self.server = PageServer(access, self.feed, self.metrics)
        self.closed = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    def close_rounds(self, count, **changes):
        for _ in range(count):
            self.closed += 1
            self.store.record(self.closed, record(self.closed, self.devices, **changes))

    def publish(self, *, closed=0, at_s=None, plan="", labels=None, **options):
        """Close so many more rounds, and publish facts with the next round open."""
        self.close_rounds(closed)
        live = facts(self.devices, self.closed + 1, **options)
        live = dataclasses.replace(live, alive_at_s=int(time.time()) if at_s is None else at_s)
        self.feed.publish(
            Facts(
                fleet=self.feed.fleet,
                running=True,
                live=live,
                broker=BROKER,
                active=self.devices,
                labels=labels or {},
                now_s=0,
                expires={"broker": int(time.time()) + 864_000},
            ),
            self.plan if plan == "" else plan,
        )

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *_):
        self.server.close()
        self.store.close()
