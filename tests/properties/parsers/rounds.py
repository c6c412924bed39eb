"""Parsers of a device: announcements, means and checkpoints, and the run package."""

from __future__ import annotations

import dataclasses

import numpy as np

from crypto.seal.envelope import GroupKey, open_from_group, read_head, seal_to_group
from crypto.seal.replay import ReplayWatermark
from edge_client.models.checkpoints import CONTENT_LABEL, checkpoint_head
from edge_client.models.store import StateStore
from edge_client.protocol import round_state as agent
from edge_client.run.beginning import LateStart, open_run, resume_run
from edge_client.run.held_models import HeldModels
from edge_client.storage.state import DeviceState
from shoal.membership.statements import sign_statement
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Announcement
from shoal.protocol.states import StateId
from tests.helpers.round_runs import LENGTH, TRAIN, Scene
from tests.properties.parsers.every import Parser

MOST_TASK_BYTES = 1 << 20


class Rounds:
    """A run in round 7, for which dev-2 takes a checkpoint of round 5 and the mean of round 6; dev-3 has not begun it.

    Attributes:
        announced: round 7; ref: the checkpoint; mean: its mean.
    """

    def __init__(self, root):
        self.scene = scene = Scene(root, "dev-1", "dev-2", "dev-3")
        self.device, away, steps = scene.device("dev-1"), scene.device("dev-2"), ()
        for round_ in range(1, 7):
            scene.serve(self.device, scene.announcement(round_, steps=steps))
            steps = (*steps, scene.step(round_, {0: np.ones(LENGTH, np.float32)}))[-2:]
        (self.mean,) = steps[-1].means
        self.ref = scene.checkpoint("dev-1", self.device, (0, 5), 6)
        self.announced = scene.announcement(7, steps=steps, checkpoints=(self.ref,), statements=self._statements())
        self.member = scene.parties.members["dev-2"]
        self.run, self.states = away._run, away.states

    def _statements(self):
        signed = []
        for name in ("dev-1", "dev-3"):
            statement = self.device.states.statement(name, 6, self.scene.heads[6])
            signed.append(sign_statement(self.scene.parties.members[name].identity, statement))
        return tuple(signed)

    def models(self):
        """Return the models of dev-2 before the round."""
        return HeldModels(self.run, self.member, StateStore.open(self.member.directory), self.states)

    def transfer(self, ref):
        """Return what is published for a mean or a checkpoint."""
        return self.scene.transfers[ref.label, ref.transfer]

    def resealed(self, inside):
        """Return a checkpoint of any contents, as a hostile device can seal it."""
        identity, keys = self.scene.parties.members["dev-1"].identity, self.scene.keys(6)
        head = checkpoint_head(keys, StateId(0, 5), "dev-1")
        return seal_to_group(identity, GroupKey(keys.fleet, CONTENT_LABEL, keys.content), head, inside)

    def inside(self):
        """Return the contents of the checkpoint."""
        sealed, keys = self.transfer(self.ref), self.scene.keys(6)
        group = GroupKey(keys.fleet, CONTENT_LABEL, keys.content)
        signer = self.scene.parties.members["dev-1"].identity.member.sign_key
        return bytes(open_from_group(group, sealed, *read_head(sealed), signer))


def parsers(root):
    """Return the parsers; ``root`` is an empty directory."""
    rounds = Rounds(root)
    planned, _ = agent.step(agent.RoundState(1), agent.Planned(rounds.scene.plan))
    announced = encode(dataclasses.replace(rounds.announced, assignment_of=(0, 0, 0)))

    def announcement(data):
        after, actions = agent.step(planned, agent.Announced(decode(data, Announcement)))
        models = rounds.models()
        for action in actions:
            if isinstance(action, agent.Locate):
                needed = models.locate(action.announcement, action.assignment)
                for label, transfer in needed.items():
                    models.take(label, transfer, memoryview(rounds.scene.transfers.get((label, transfer), b"")))
                assert models.thetas(action.announcement, action.assignment).keys() == set(action.assignment.candidates)
        return after

    def taken(ref, seal=lambda data: data):
        def take(data):
            models = rounds.models()
            models.locate(rounds.announced, TRAIN)
            assert models.take(ref.label, ref.transfer, memoryview(seal(data)))
            return models.arrived()

        return take

    def early(data):
        models = rounds.models()
        models.take(rounds.mean.label, rounds.mean.transfer, memoryview(data))
        models.locate(rounds.announced, TRAIN)
        return models.arrived()

    def late(data):
        start, member = LateStart(rounds.scene.plan, rounds.scene.package), rounds.scene.parties.members["dev-3"]
        ((label, transfer),) = start.locate(rounds.announced).items()
        return start.take(label, transfer, memoryview(rounds.resealed(data)), member, MOST_TASK_BYTES)

    newcomer = rounds.scene.parties.members["dev-3"]
    stored = DeviceState(rounds.member.directory).load_run()
    mean, inside = bytes(rounds.transfer(rounds.mean)), rounds.inside()
    return [
        Parser("announcement with its models, by the aggregator", (announced,), announcement),
        Parser("mean, by the aggregator", (mean,), taken(rounds.mean)),
        Parser("mean, before its announcement", (mean,), early),
        Parser("checkpoint, by a device", (inside,), taken(rounds.ref, rounds.resealed)),
        Parser("checkpoint, to a newcomer", (inside,), late),
        Parser("run package", (rounds.scene.package,), lambda d: open_run(d, newcomer)),
        Parser("stored run", (stored,), lambda d: resume_run(d, rounds.member, ReplayWatermark())),
    ]
