"""Run plans, uploads and contributions made by hand, for tests that need no fleet."""

import dataclasses
import hashlib
import json
from collections import defaultdict

import numpy as np

from aggregator.rounds.engine import Engine
from aggregator.rounds.held_models import HeldModels, offers_of
from aggregator.rounds.relay import States, settle
from aggregator.storage.store import OpenedUpload, UploadRef
from aggregator.strategies.base import ClientUpdate, contribution_of, in_order, norm_of, starts_of
from aggregator.strategies.registry import make_strategy, models_needed
from aggregator.strategies.robust import RobustMean
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPlan, SegmentSpec
from shoal.protocol.messages import SHARED_MODEL, Phase, Upload
from shoal.protocol.recipe import LocalTraining, Recipe, as_settings
from shoal.protocol.states import NO_TRANSCRIPT, StateId
from shoal.util.state_codec import decode_state, encode_state
from shoal.version import WIRE
from tests.helpers.statements import sealed_checkpoints, signed_statement

KEY_VERSION = 3
ROUND_KEY = b"k" * 16
"""Names the mask of updates made by hand."""
D = 6
FULL_BATCH = LocalTraining(epochs=0, steps=1, batch_size=0)


def a_recipe(algorithm="fedavg", settings=None, **choices):
    """Return a recipe with ``settings`` by name."""
    return Recipe(algorithm, as_settings(settings or {}), **choices)


PLAIN = {
    "rounds": 20,
    "mode": "permutation",
    "norm_limit": 100.0,
    "min_contributors": 1,
    "quorum": 0.6,
    "deadline_s": 30.0,
    "robust": "off",
    "seed": 7,
    "local": FULL_BATCH,
}


def run_plan(algorithm="fedavg", settings=None, **changes):
    """Return a valid plan of 20 rounds, d = 6, of plain means that one contributor suffices for.

    ``changes`` are fields of the plan or of its recipe.
    """
    plan = RunPlan(
        wire=WIRE,
        fleet="demo",
        run=1,
        run_id=b"r" * 16,
        roster_sequence=3,
        task_digest=b"t" * 32,
        recipe=a_recipe(algorithm, settings, **PLAIN),
        origins=1,
        max_models=4096,
        segments=(SegmentSpec("cluster", D),),
        key_version=KEY_VERSION,
    )
    return altered(plan, **changes)


def altered(plan, **changes):
    """Return a plan with other values of its fields, or of its recipe's."""
    own = {name: changes.pop(name) for name in RunPlan.__slots__ if name in changes}
    recipe = own.pop("recipe", plan.recipe)
    return dataclasses.replace(plan, recipe=dataclasses.replace(recipe, **changes), **own)


def engine_of(run, seed=bytes(16)):
    average = RobustMean(run)
    return Engine(run, make_strategy(run, None, average), seed, average=average)


def resumed(engine, devices, round_=1, before=None):
    """Return the engine's state with a round open for ``devices``, which hold the run's origins."""
    held = HeldModels.begin(engine.run, devices, KEY_VERSION)
    before = engine.strategy.init(devices) if before is None else before
    return engine.resume(devices, before, held, round_, devices)[0]


def upload_of(engine, state, device, /, values=None, signer=None, **changes):
    """Return the upload that answers the open round's assignment, and its body: vector ``values`` (d,), ones by default.

    Its statement names all states of the run's models, and ``signer`` signs it: the device's keys, if the test has any. The
    checkpoints that the assignment orders follow the vector.
    """
    run, assignment = engine.run, state.plan.assignments[device]
    body = b""
    if assignment.train:
        values = np.ones(run.length) if values is None else values
        body = np.asarray(values, "<f4").tobytes()
    states, attached = state.held.states, b""
    if assignment.seal:
        offers = offers_of(state.plan, states)
        attached = sealed_checkpoints(device, run, state.round, [(m, offers[m]) for m in assignment.seal], signer)
    fields = {
        "fleet": run.fleet,
        "run": run.run,
        "run_id": run.run_id,
        "round": state.round,
        "phase": assignment.phase,
        "nonce": engine.nonce(state.round),
        "device": device,
        "recipient": bytes(32),
        "task_digest": run.task_digest,
        "mode": run.recipe.mode,
        "key_id": ROUND_KEY if body else bytes(16),
        "key_version": state.held.key_version,
        "model": assignment.candidates[0],
        "samples": 10,
        "loss": 1.0,
        "margins": (0.0,) * assignment.figures,
        "correct": 3 if assignment.evaluate else 0,
        "tested": 4 if assignment.evaluate else 0,
        "length": len(body) // 4,
        "attached": len(attached),
        "nearest": min(assignment.compare, default=0),
    }
    if "statement" not in changes:
        fields["statement"] = signed_statement(
            device, run, state.round, states.names.values(), signer=signer, head=state.head or NO_TRANSCRIPT
        )
    return Upload(**{**fields, **changes}), body + attached


WRITTEN = defaultdict(list)
"""Uploads that are written and not committed, by store."""


def digest_of(upload, body):
    """Return a stand-in for the digest that the sender of a sealed upload signs."""
    return hashlib.sha256(encode(upload) + body).digest()


def append_upload(store, upload, body, norm, digest):
    """Write an upload, which the next `commit_uploads` of the store commits."""
    store.open_updates(upload.round)
    ref = UploadRef(upload.device, bytes(16))
    WRITTEN[store].append(store.write(OpenedUpload(upload, encode(upload), ref, digest, norm, body=body)))


def commit_uploads(store):
    """Make the appended uploads of a store durable, and return them."""
    store.syncer()()
    return store.commit(WRITTEN.pop(store, []))


def contribution(device, values=None, *, model=0, samples=10, loss=1.0, **changes):
    """Return a contribution with vector ``values`` (d,), or without one."""
    vector = None if values is None else np.asarray(values, np.float32)
    made = ClientUpdate(
        round=1,
        phase=Phase.TRAIN,
        device=device,
        model=model,
        samples=samples,
        loss=loss,
        key_id=ROUND_KEY,
        vector=vector,
    )
    made = dataclasses.replace(made, norm=0.0 if vector is None else norm_of(vector))
    return dataclasses.replace(made, **changes)


def stored(upload, body):
    """Return an upload as the store returns it."""
    vector = np.frombuffer(body, "<f4", upload.length) if upload.length else None
    attached = body[4 * upload.length :]
    return contribution_of(upload, vector, attached=attached, digest=digest_of(upload, body))


class Rounds:
    """A strategy driven without an engine: ``answer(device, assignment, round)`` gives each device's contribution.

    It holds the models in the devices' place, without masks.

    Args:
        run: the plan.
        devices: their names.
        origins: (run.origins, d) where the models start; zeros by default.

    Attributes:
        plan: of the round that is open, or of the last one.
        steps: those of the last round, by which models reached new states.
    """

    def __init__(self, run, devices, origins=None):
        self.strategy = make_strategy(run)
        assert models_needed(run) >= 1
        self.devices = tuple(devices)
        self.state = self.strategy.init(self.devices)
        self.round = 0
        self.events = []
        self.plan, self.steps = None, ()
        self.states = States.of_origins(run.origins)
        origins = np.zeros((run.origins, run.length)) if origins is None else origins
        self._contributors = {}
        self._vectors = {StateId(i, 0): np.asarray(origin, np.float64) for i, origin in enumerate(origins)}

    def theta(self, slot, segment=""):
        """Return a model, or a segment of one, in the clear: float64."""
        total = sum(w * self._part(self.states[number], segment) for number, w in starts_of([(1.0, slot)]).items())
        return total if slot.offset is None else total + slot.offset

    def contributors(self, slot):
        """Return the number of devices in the mean that moved a model last; 0 at its origin."""
        return self._contributors.get(self.states[slot.origin], 0)

    def _part(self, state, segment):
        # Origins are whole vectors, later states have only their segment.
        vector = self._vectors[state]
        return vector[self.strategy.run.span(segment)] if state.round == 0 else vector

    def whole(self, plan, model):
        """Return a model of a plan in the clear, (d,) float64, with the shared segment in its place."""
        if plan.shared is None:
            return self.theta(plan.models[model])
        run, found = self.strategy.run, np.empty(self.strategy.run.length)
        found[run.span("shared")] = self.theta(plan.shared, "shared")
        found[run.span("cluster")] = self.theta(plan.models[model], "cluster")
        return found

    def step(self, answer, present=None):
        """Do one round with the devices ``present`` and return its outcome."""
        self.round += 1
        self.state, self.plan = self.strategy.plan(self.state, self.round, tuple(sorted(present or self.devices)))
        answers = (answer(device, assignment, self.round) for device, assignment in self.plan.assignments.items())
        given = in_order(a for a in answers if a is not None)
        self.state, outcome = self.strategy.close(self.state, self.plan, given)
        self.settle()
        self.events.extend(outcome.events)
        return outcome

    def go(self, answer, rounds, present=None):
        """Do so many rounds and return the outcome of the last."""
        return [self.step(answer, present) for _ in range(rounds)][-1]

    def after(self, answer, rounds=1, present=None):
        """Do so many rounds and return these `Rounds`."""
        self.go(answer, rounds, present)
        return self

    def settle(self):
        """Let the devices take the means of the round that has closed."""
        models = self.strategy.models_of(self.state)
        self.state, states, steps = settle(self.state, models, self.states, self.round)
        self.steps = steps
        for step in steps:
            self._contributors[step.state] = step.contributors
            segment = ""
            if SHARED_MODEL in models:
                segment = "shared" if step.state.model == SHARED_MODEL else "cluster"
            self._vectors[step.state] = sum(w * self._part(ref, segment) for w, ref in step.terms)
            if step.mean is not None:
                self._vectors[step.state] = self._vectors[step.state] + step.mean
        self.states = states

    def reload(self):
        """Replace the state by the one loaded from its encoded form, which is returned."""
        encoded = encode_state(self.state)
        document = json.loads(json.dumps(encoded.document))
        self.state = decode_state(self.strategy.state_type, document, encoded.arrays)
        return encoded
