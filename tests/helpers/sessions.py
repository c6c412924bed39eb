"""A device's session without a device: facts made by hand, and a driver that remembers every action. Or with little more."""

from __future__ import annotations

import dataclasses

from crypto.seal.envelope import GroupKey
from edge_client.config import EdgeConfig
from edge_client.protocol.declining import Declines
from edge_client.protocol.presence import Attendance
from edge_client.protocol.round_state import RoundState
from edge_client.protocol.session import DeviceSession
from edge_client.protocol.session_io import Facts, RosterFacts
from edge_client.runtime import DeviceRuntime

GROUP, NEXT_GROUP = (GroupKey("demo", "broadcast", bytes([n]) * 32) for n in (1, 2))
ROSTER = RosterFacts(sequence=3, signature=bytes(64), devices=4)
FACTS = Facts(now_s=0.0, roster=ROSTER, group=GROUP, key_version=3, keys_since=3)


def new_session(**changes):
    """Return the session of the roster's first device, before its program has subscribed to anything."""
    fields = {"name": "dev-1", "fleet": "demo", "round": RoundState(0), "declines": Declines(0)}
    return DeviceSession(**{**fields, "presence": Attendance(GROUP), **changes})


class Driver:
    """Hands events to a session and carries nothing out.

    Attributes:
        session: the session; facts: its surroundings, changed by `at`; done: actions since they were last taken.
    """

    def __init__(self, **changes):
        self.session = new_session(**changes)
        self.facts = FACTS
        self.done = []

    def at(self, now_s=None, *, roster=None, **changes):
        """Change the surroundings; return the driver."""
        if now_s is not None:
            changes["now_s"] = now_s
        if roster is not None:
            changes["roster"] = dataclasses.replace(self.facts.roster, **roster)
        self.facts = dataclasses.replace(self.facts, **changes)
        return self

    def go(self, steps):
        """Take what a method of the session returned; return its actions."""
        self.session, actions = steps
        self.done.extend(actions)
        return actions

    def hear(self, channel, content):
        """Receive a message, and look for missing ones, as a program does after each message; return all actions."""
        done = self.go(self.session.receive(channel, content, self.facts))
        return (*done, *self.go(self.session.settled(self.facts)))

    def tell(self, event):
        """Tell the session of an event; return the actions."""
        return self.go(self.session.happened(event, self.facts))

    def tick(self, now_s=None, **changes):
        """Let time pass; return the actions."""
        self.at(now_s, **changes)
        return self.go(self.session.tick(self.facts))

    def take(self, kind=object):
        """Return the actions of a kind since the last time."""
        done, self.done = self.done, []
        return [action for action in done if isinstance(action, kind)]


class IdleWorker:
    """Takes jobs and runs none.

    Attributes:
        jobs: those submitted; cancelled: number of cancellations; closed: whether it was.
    """

    def __init__(self):
        self.jobs, self.cancelled, self.closed = [], 0, False

    def submit(self, job, _done):
        """Store a job."""
        self.jobs.append(job)

    def cancel(self):
        """Count a cancellation."""
        self.cancelled += 1

    def close(self):
        """Record the end."""
        self.closed = True


def new_runtime(membership, transport, worker=None, **settings):
    """Return the runtime of a device that has no samples, not started."""
    config = EdgeConfig(membership.directory, membership.directory, **settings)

    def no_samples(_manifest):
        raise AssertionError("no run, no samples")

    return DeviceRuntime(
        config,
        membership,
        transport,
        worker or IdleWorker(),
        birth=5,
        results=lambda callback: callback(),
        uniform=lambda: 0.0,
        samples=no_samples,
    )


def hand_over(runtime, channel, content):
    """Hand the content of an authentic message to a device's session, and carry its actions out."""
    runtime._go_on(runtime.session.receive(channel, content, runtime._facts()))
