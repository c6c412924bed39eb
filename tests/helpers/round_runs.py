"""A run with round keys as the owner signs it, and the aggregator's part in it, made by hand for one device after another."""

import dataclasses
import hashlib

import numpy as np

from crypto.mask.derivation import derive, segment_keys
from crypto.mask.masking import mask
from edge_client.models.checkpoints import seal_checkpoint
from edge_client.run.beginning import keep_run, open_run
from edge_client.storage.state import DeviceState
from shoal.membership.statements import sign_statement
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.codec import encode
from shoal.protocol.messages import NO_ASSIGNMENT, SHARED_MODEL, Announcement, Assignment, Phase, Share
from shoal.protocol.states import (
    NO_TRANSCRIPT,
    CheckpointRef,
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    StateId,
    StateRecipe,
    Step,
    Term,
    TranscriptEntry,
    checkpoint_number,
    mean_number,
)
from tests.helpers.parties import Parties
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle

INPUTS, CLASSES = 4, 3
LENGTH = (INPUTS + 1) * CLASSES
ONE = np.ones(LENGTH, np.float32)
NAMES = ("dev-1", "dev-2", "dev-3")
TRAIN = Assignment(Phase.TRAIN, (0,), Share.TRAIN, train=True, evaluate=False, margins=False)


def origins(count=1):
    """Return origins (count, LENGTH), float32."""
    return np.random.default_rng(7).standard_normal((count, LENGTH)).astype(np.float32)


class Scene:
    """A fleet whose owner has signed one run with round keys.

    Attributes:
        parties: owner and members; package: the run package; plan: its plan.
    """

    def __init__(self, root, *names, bundle=None, start=None, **options):
        self.parties = Parties(root, *names)
        bundle = bundle or logistic_bundle(INPUTS, CLASSES)
        given = {"algorithm": "fedavg", "rounds": 20, "mode": "rotation", "min_contributors": 2, **options}
        self.plan = make_plan(self.parties.owner, bundle, a_recipe(**given))
        start = origins(self.plan.origins) if start is None else start
        self.package = write_run(self.parties.owner, self.plan, bundle, start).read_bytes()
        self.transfers, self.heads = {}, {}

    def device(self, name):
        """Return the models of a device that begins the run."""
        member = self.parties.members[name]
        begun = open_run(self.package, member)
        return keep_run(begun, self.package, member, DeviceState(member.directory))

    def announcement(self, round_, *, states=None, assignment=TRAIN, key_version=None, **held):
        """Return the announcement of a round; ``states`` is model -> (model, round), by default each at round_ - 1."""
        states = states or {0: (0, round_ - 1)}
        offers = tuple(Offer(model, StateId(*at)) for model, at in sorted(states.items()))
        plan = self.plan
        number = plan.key_version if key_version is None else key_version
        announced = Announcement(
            fleet=plan.fleet,
            run=plan.run,
            run_id=plan.run_id,
            roster_sequence=plan.roster_sequence,
            round=round_,
            nonce=bytes([round_]) * 16,
            deadline_s=60.0,
            finished=round_ > plan.recipe.rounds,
            assignments=(assignment,),
            assignment_of=(0, NO_ASSIGNMENT),
            held=RoundModels(number, offers, **held),
        )
        self.heads[round_] = self.entry(announced).digest
        return changed(announced, **{"transcript": self.heads[round_], **held})

    def entry(self, announcement):
        """Return the entry of an announcement in the transcript."""
        held, plan = announcement.held, self.plan
        newest = held.steps[-1] if held.steps else None
        return TranscriptEntry(
            previous=self.heads.get(announcement.round - 1, NO_TRANSCRIPT),
            fleet=plan.fleet,
            run_id=plan.run_id,
            round=announcement.round,
            offers=held.offers,
            step=None if newest is None else newest.step,
            means=() if newest is None else tuple(mean.digest for mean in newest.means),
        )

    def chain(self, key_version=None):
        """Return the run's chain, as the owner derives it."""
        version = self.parties.owner.version_key
        assert key_version in (None, version.number)
        return version.begin_run_of(self.plan)

    def keys(self, round_):
        """Return the keys of a round."""
        chain = self.chain()
        chain.skip_to(round_)
        return chain.take()

    def step(self, round_, deltas, *, terms=None, key_id=None, limit=100.0):
        """Return the retained step in which each model moves by its delta, and keep the means to be sent.

        Args:
            round_: the round.
            deltas: model -> (d,) float32 in clear, or None for a recipe without a mean.
            terms: model -> (weight, model, round) of each state in its recipe; by default its last state.
            key_id: in place of the id of the round's mask.
            limit: largest norm of a mean.
        """
        plan, keys = self.plan, self.keys(round_)
        masks = segment_keys(derive(keys.mask, keys.context_of(plan)))
        recipes, refs = [], []
        for model, delta in sorted(deltas.items()):
            given = (terms or {}).get(model, ((1.0, model, round_ - 1),))
            recipes.append(
                StateRecipe(model, round_, tuple(Term(m, r, w) for w, m, r in given), None if delta is None else 1.0)
            )
            if delta is None:
                continue
            segment = "" if len(plan.segments) == 1 else ("shared" if model == SHARED_MODEL else "cluster")
            masked = mask(delta, masks[segment])
            header = MeanHeader(
                fleet=plan.fleet,
                run_id=plan.run_id,
                round=round_,
                key_id=key_id or masked.key_id,
                model=model,
                length=len(delta),
                segment=segment,
            )
            refs.append(self._send(model, mean_number(model, round_), encode(header), masked.values.tobytes()))
        step = Step(round_, tuple(recipes), tuple(sorted(r.state for r in recipes)), limit)
        return RetainedStep(step, tuple(refs))

    def checkpoint(self, name, models, state, round_, *, task=None):
        """Return the reference to a checkpoint that a device seals in a round, and keep it to be sent."""
        held, member = models.states.held[StateId(*state)], self.parties.members[name]
        keys = self.keys(round_)
        task = logistic_bundle(INPUTS, CLASSES).to_bytes() if task is None else task
        sealed = seal_checkpoint(member.identity, keys, held, task).payload
        label = self.label(checkpoint_number(state[0]))
        transfer = self._transfer(label, sealed)
        return CheckpointRef(StateId(*state), round_, keys.key_version, label, transfer)

    def label(self, number):
        """Return a topic label."""
        return self.parties.server.group.topic_label(self.plan.run_id, number)

    def _send(self, model, number, header, body):
        label = self.label(number)
        digest = hashlib.sha256(body).digest()
        return MeanRef(model, label, self._transfer(label, header + body), 3, digest)

    def _transfer(self, label, plain):
        transfer = len(self.transfers).to_bytes(16, "big")
        self.transfers[label, transfer] = plain
        return transfer

    def serve(self, models, announcement, assignment=TRAIN):
        """Bring a device's models up to a round as the runtime does, and return its thetas."""
        for label, transfer in models.locate(announcement, assignment).items():
            assert models.take(label, transfer, memoryview(self.transfers[label, transfer]))
        thetas = models.thetas(announcement, assignment)
        models.store(announcement)
        return thetas


def changed(announcement, **changes):
    """Return an announcement with other held models."""
    return dataclasses.replace(announcement, held=dataclasses.replace(announcement.held, **changes))


def statements(scene, models, round_, names=NAMES):
    """Return what devices sign in a round about the states that they hold."""
    return tuple(
        sign_statement(
            scene.parties.members[n].identity,
            models[n].states.statement(n, round_, scene.heads.get(round_, NO_TRANSCRIPT)),
        )
        for n in names
    )


def to_round(scene, models, rounds, names=NAMES):
    """Let the devices take part in rounds 1 to ``rounds``; every mean is one in each coordinate. Return the retained steps."""
    steps = ()
    for round_ in range(1, rounds + 1):
        announced = scene.announcement(round_, steps=steps)
        for name in names:
            scene.serve(models[name], announced)
        steps = (*steps, scene.step(round_, {0: ONE}))[-2:]
    return steps
