"""Devices that hold the mask: they train in the clear, upload masked, and take a run from one mask epoch into the next."""

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np

from aggregator.strategies.base import ClientUpdate, RoundPlan, dump_state, norm_of, whole_offset
from aggregator.strategies.registry import make_strategy
from aggregator.strategies.renewal import Renewal
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.secret import MaskSecret
from shoal.protocol.messages import Phase
from shoal.types import MaskedVector
from tests.helpers.plans import Rounds, contribution, contributions_in

SECRET = bytes(range(32))


def in_epoch(run, epoch):
    """Return the run in a mask epoch, and the key of that epoch."""
    key = derive(MaskSecret(SECRET), MaskContext.of_plan(run, epoch))
    return dataclasses.replace(run, epoch=epoch, key_id=key.key_id), key


def samples_of(device):
    """Return the same number of samples for the same device."""
    return 10 + zlib.crc32(device.encode()) % 50


def inside(value, kind):
    """Return everything of a kind that a state refers to, however deep."""
    if isinstance(value, kind):
        yield value
    if dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from inside(getattr(value, f.name), kind)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from inside(part, kind)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from inside(part, kind)


class Fleet(Rounds):
    """A strategy and devices that walk a part of the way to their goals.

    Attributes:
        goals: device -> the model it would like to have, (d,); it walks the share ``pull`` of the way to it.
        asked: (round, device, order) of all orders.
        kept: (device, round) -> the raw update, which the device stores as its assignment says.
    """

    def __init__(self, run, devices, goals, *, origins=None, pull=0.5):
        run, self.key = in_epoch(run, 1)
        super().__init__(run, devices)
        rng = np.random.default_rng(17)
        self.origins = [rng.standard_normal(run.length) for _ in range(run.origins)] if origins is None else origins
        self.goals, self.pull = goals, pull
        self.asked, self.last, self.kept = [], {}, {}
        self.clusters = {}

    def theta(self, slot, shared=None):
        """Return the clear model of a slot, (d,) float64."""
        run = self.strategy.run
        theta = slot.scale * self.origins[slot.origin].astype(np.float64)
        if shared is not None:
            theta[run.span("shared")] = self.origins[shared.origin][run.span("shared")]
        offset = whole_offset(run, RoundPlan(0, {0: slot}, {}, shared=shared), 0)
        if offset is not None:
            theta += unmask(MaskedVector(offset, run.key_id), self.key)
        return theta

    def answer(self, plan, device, assignment):
        """Return a device's answer to its assignment."""
        self.asked.append((plan.round, device, assignment))
        if assignment.keep and self.last.get(device, (0,))[0] == assignment.keep:
            self.kept[device, assignment.keep] = self.last[device][1]
        thetas = {m: self.theta(plan.models[m], plan.shared) for m in assignment.candidates}
        loss = {m: float(np.linalg.norm(self.goals[device] - theta)) for m, theta in thetas.items()}
        model = assignment.candidates[0] if assignment.margins else min(assignment.candidates, key=loss.get)
        made = contribution(
            device,
            round=plan.round,
            phase=Phase(assignment.phase),
            model=model,
            samples=samples_of(device),
            loss=loss[model],
            margins=tuple(loss[m] - loss[model] for m in assignment.candidates) if assignment.margins else (),
            key_id=self.key.key_id,
        )
        if not assignment.train:
            return made
        raw = (self.pull * (self.goals[device] - thetas[model])).astype(np.float32)
        self.last[device] = (plan.round, raw)
        if assignment.norm:
            made = dataclasses.replace(made, model_norm=float(np.linalg.norm(thetas[model] + raw)))
        return dataclasses.replace(made, vector=mask(raw, self.key).values, norm=norm_of(raw))

    def step(self, present=None):
        """Do one round with the devices ``present`` and return its outcome."""
        self.round += 1
        self.state, plan = self.strategy.plan(self.state, self.round, tuple(sorted(present or self.devices)))
        for device, assignment in plan.assignments.items():
            self.state = self.strategy.absorb(self.state, self.answer(plan, device, assignment))
        self.state, outcome = self.strategy.close(self.state, plan)
        self.events.extend(outcome.events)
        self.clusters = outcome.clusters
        return outcome

    def run_to(self, round_, present=None):
        """Do rounds up to and with ``round_``."""
        while self.round < round_:
            self.step(present)
        return self

    def rollover(self, *, lost=(), gone=()):
        """End the mask epoch: fold in the clear, mask again, and assert that no vector under the old key is left.

        Args:
            lost: names of carried vectors that don't come through, besides those of too few devices.
            gone: devices that do not re-mask their updates.
        """
        old, before = self.strategy, self.state
        inherited, left = old.inherited(before), dump_state(before)
        found = contributions_in(before)
        models = sorted(inherited.models)
        origins = [self.theta(inherited.models[m], inherited.shared).astype(np.float32) for m in models]
        carried = {
            name: unmask(MaskedVector(c.vector, old.run.key_id), self.key)
            for name, c in inherited.carried.items()
            if name not in lost and c.contributors >= old.run.min_contributors
        }
        run, self.key = in_epoch(old.run, old.run.epoch + 1)
        self.origins = origins
        own = {}
        for key in inherited.own:
            round_, _, device = key
            last = self.last.get(device, (0, None))
            raw = self.kept.get((device, round_), last[1] if last[0] == round_ else None)
            if raw is not None and device not in gone:
                own[key] = dataclasses.replace(found[key], vector=mask(raw, self.key).values, key_id=run.key_id)
        carried = {name: mask(v, self.key).values for name, v in carried.items()}
        renewal = Renewal(self.round, {m: i for i, m in enumerate(models)}, carried, own)
        self.strategy = make_strategy(run)
        self.state = self.strategy.renewed(before, renewal)
        self._forgotten(old, before, left)
        return inherited

    def _forgotten(self, old, before, left):
        """Fail if a vector, or an upload of the old epoch is still there."""
        assert {c.key_id for c in inside(self.state, ClientUpdate)} <= {self.strategy.run.key_id}
        known = {v.tobytes() for v in inside(before, np.ndarray) if v.any()}
        assert not [v for v in inside(self.state, np.ndarray) if v.tobytes() in known]
        encoded = dump_state(self.state)
        assert not [v for v in encoded.arrays.values() if v.tobytes() in known]
        assert encoded.keys <= left.keys
        assert old.run.key_id != self.strategy.run.key_id

    def endings(self, devices=None):
        """Return the clear models that each device would be offered in the end, in the order of its candidates."""
        devices = tuple(devices or self.devices)
        plan = self.strategy.final(self.state, self.round + 1, devices)
        return {d: [self.theta(plan.models[m], plan.shared) for m in plan.assignments[d].candidates] for d in devices}


def assert_same(one, other, devices=None):
    """Fail unless two fleets have the same clusters and, to 1e-5, the same models in the clear."""
    assert one.clusters == other.clusters
    mine, theirs = one.endings(devices), other.endings(devices)
    assert mine.keys() == theirs.keys()
    for device, models in mine.items():
        for a, b in zip(models, theirs[device], strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * max(1.0, float(np.linalg.norm(b)))
