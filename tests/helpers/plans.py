"""Run plans, uploads and contributions made by hand, for tests that need no fleet."""

import dataclasses
import hashlib
import json

import numpy as np

from aggregator.rounds.engine import Engine
from aggregator.strategies.base import ClientUpdate, contribution_of, dump_state, load_state, norm_of
from aggregator.strategies.registry import make_strategy, models_needed
from shoal.protocol.codec import encode
from shoal.protocol.documents import LocalSettings, RunPlan, SegmentSpec, Setting
from shoal.protocol.messages import Phase, Upload

KEY_ID = b"k" * 16
D = 6
FULL_BATCH = LocalSettings(epochs=0, steps=1, batch_size=0, lr=0.1, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0)


def run_plan(algorithm="fedavg", settings=None, **changes):
    """Return a valid plan of 20 rounds, d = 6, that one contributor suffices for."""
    fields = {
        "fleet": "demo",
        "run": 1,
        "run_id": b"r" * 16,
        "roster_sequence": 3,
        "task_digest": b"t" * 32,
        "algorithm": algorithm,
        "settings": tuple(Setting(k, str(v)) for k, v in sorted((settings or {}).items())),
        "origins": 1,
        "max_models": 4096,
        "rounds": 20,
        "mode": "permutation",
        "epoch": 1,
        "epoch_rounds": 20,
        "key_id": KEY_ID,
        "segments": (SegmentSpec("cluster", D),),
        "norm_limit": 100.0,
        "min_contributors": 1,
        "quorum": 0.6,
        "participation": 1.0,
        "deadline_s": 30.0,
        "weighting": "samples",
        "evaluate_every": 0,
        "seed": 7,
        "local": FULL_BATCH,
        "pretrain": FULL_BATCH,
    }
    fields |= changes
    if "epoch_rounds" not in changes:
        fields["epoch_rounds"] = fields["rounds"]
    return RunPlan(**fields)


def engine_of(run, seed=bytes(16)):
    return Engine(run, make_strategy(run), seed)


def upload_of(engine, state, device, /, values=None, **changes):
    """Return the upload that answers the open round's order: vector ``values`` (d,), ones by default."""
    run, assignment = engine.run, state.plan.assignments[device]
    body = b""
    if assignment.train:
        values = np.ones(run.length) if values is None else values
        body = np.asarray(values, "<f4").tobytes()
    fields = {
        "fleet": run.fleet,
        "run": run.run,
        "run_id": run.run_id,
        "epoch": run.epoch,
        "round": state.round,
        "phase": assignment.phase,
        "nonce": engine.nonce(state.round),
        "device": device,
        "recipient": bytes(32),
        "task_digest": run.task_digest,
        "mode": run.mode,
        "key_id": run.key_id,
        "model": assignment.candidates[0],
        "samples": 10,
        "loss": 1.0,
        "margins": (0.0,) * len(assignment.candidates) if assignment.margins else (),
        "correct": 3 if assignment.evaluate else 0,
        "tested": 4 if assignment.evaluate else 0,
        "length": len(body) // 4,
    }
    return Upload(**{**fields, **changes}), body


def digest_of(upload, body):
    """Return a stand-in for the digest that the sender of a sealed upload signs."""
    return hashlib.sha256(encode(upload) + body).digest()


def contribution(device, values=None, *, model=0, samples=10, loss=1.0, **changes):
    """Return a contribution with vector ``values`` (d,), or without one."""
    vector = None if values is None else np.asarray(values, np.float32)
    made = ClientUpdate(
        round=1, phase=Phase.TRAIN, device=device, model=model, samples=samples, loss=loss, key_id=KEY_ID, vector=vector
    )
    made = dataclasses.replace(made, norm=0.0 if vector is None else norm_of(vector))
    return dataclasses.replace(made, **changes)


def stored(upload, body):
    """Return an upload as the store returns it."""
    return contribution_of(upload, np.frombuffer(body, "<f4") if body else None)


class Rounds:
    """A strategy driven without an engine: ``answer(device, assignment, round)`` gives each device's contribution."""

    def __init__(self, run, devices):
        self.strategy = make_strategy(run)
        assert models_needed(run) >= 1
        self.devices = tuple(devices)
        self.state = self.strategy.init(self.devices)
        self.round = 0
        self.events = []

    def step(self, answer, present=None):
        """Do one round with the devices ``present`` and return its outcome."""
        self.round += 1
        self.state, plan = self.strategy.plan(self.state, self.round, tuple(sorted(present or self.devices)))
        for device, assignment in plan.assignments.items():
            given = answer(device, assignment, self.round)
            if given is not None:
                self.state = self.strategy.absorb(self.state, given)
        self.state, outcome = self.strategy.close(self.state, plan)
        self.events.extend(outcome.events)
        return outcome

    def reload(self):
        """Replace the state by the one loaded from its dump."""
        encoded = dump_state(self.state)
        seen = contributions_in(self.state)
        document = json.loads(json.dumps(encoded.document))
        self.state = load_state(self.strategy.state_type, document, encoded.arrays, seen.__getitem__)
        return encoded


def contributions_in(state):
    """Return every contribution that a CFL state refers to, by key."""
    found = list(getattr(state, "newest", {}).values())
    found += [c for node in getattr(state, "tree", {}).values() for edge in node.edges for c in edge]
    found += [c for trial in getattr(state, "trials", {}).values() for c in trial.evidence]
    return {c.key: c for c in found}
