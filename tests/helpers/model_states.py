"""A fleet's keys, roster and states, made by hand for tests of model states."""

import numpy as np

from crypto.mask.schedule import VersionKey
from crypto.seal.identity import Identity
from edge_client.models.states import ModelStates
from edge_client.models.store import PendingRound, StateFile, StateIndex
from shoal.membership.statements import sign_statement
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster
from shoal.protocol.states import (
    CheckpointRef,
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    SealedCheckpoints,
    SealedState,
    StateCertificate,
    StateId,
    StateRecipe,
    Step,
    Term,
    TranscriptEntry,
    TranscriptHead,
)

FLEET = "reef"
RUN_ID = b"r" * 16
HEAD = TranscriptHead(RUN_ID, 8, bytes(32))
IDENTITIES = tuple(Identity.generate(f"dev-{i}") for i in range(6))


def roster(identities=IDENTITIES, revoked=()):
    """Return an unsigned roster of the identities."""
    return Roster(
        fleet=FLEET,
        sequence=1,
        issued_at_s=0,
        expires_at_s=2**40,
        aggregator=None,
        devices=tuple(identity.member for identity in identities),
        revoked=tuple(revoked),
    )


def chain(version=1, run_id=RUN_ID, first_round=1):
    """Return the key chain of a run; every call with the same arguments gives the same keys."""
    return VersionKey(FLEET, version, bytes([version]) * 32).begin_run(run_id, first_round)


def take(store, round_):
    """Let a store take the keys of a round, as at its opening, and return them."""
    states, _ = store.load()
    store.commit(states, applied=0, taking=(round_,))
    return store.peek(round_)


def vector(*values):
    """Return a float32 vector."""
    return np.array(values, np.float32)


def origins(*vectors, keys=None):
    """Return the states at the start of a run: model i begins at the i-th vector."""
    return ModelStates.of_origins(dict(enumerate(vectors)), keys or chain().take())


def recipe(model, round_, *terms, mean=None):
    """Return a recipe; a term is (model, round) or (model, round, weight)."""
    return StateRecipe(model, round_, tuple(Term(*term, *([1.0] if len(term) == 2 else [])) for term in terms), mean)


def step(round_, *recipes, also_open=()):
    """Return a step that leaves the states of its recipes and ``also_open``, pairs (model, round), open."""
    names = {r.state for r in recipes} | {StateId(*pair) for pair in also_open}
    return Step(round_, recipes, tuple(sorted(names)))


def samples():
    """Return encoded messages about states by their type."""
    keys = chain().take()
    states = origins(vector(1, 2), vector(3, 4), keys=keys)
    state = states.newest(0)
    trial = step(7, recipe(1, 7, (0, 6), mean=1.0), recipe(2, 7, (0, 6)), also_open=[(0, 6)])
    pending = PendingRound(keys.key_version, keys.round, keys.mask.reveal(), keys.content)
    index = StateIndex(
        version=1,
        fleet=FLEET,
        run_id=RUN_ID,
        key_version=1,
        next_round=2,
        chain=bytes(32),
        pending=(pending,),
        states=(state.held,),
    )
    signed = certificate(states, 1, IDENTITIES[:2])
    mean = MeanRef(1, "label", bytes(16), 3)
    ref = CheckpointRef(StateId(0, 6), 7, 1, "label", bytes(16))
    offers = Offer(1, StateId(1, 7)), Offer(2, StateId(2, 7))
    kept = RetainedStep(trial, (mean,))
    header = MeanHeader(fleet=FLEET, run_id=RUN_ID, round=7, key_id=bytes(16), model=1, length=2, segment="shared")
    found = (
        RoundModels(1, offers, steps=(kept,), checkpoints=(ref,), statements=signed.statements),
        TranscriptEntry(
            previous=bytes(32),
            fleet=FLEET,
            run_id=RUN_ID,
            round=8,
            offers=offers,
            step=trial,
            means=(bytes(32),),
        ),
        kept,
        mean,
        ref,
        *offers[:1],
        HEAD,
        header,
        SealedCheckpoints((0, 2), (400, 400)),
        trial,
        trial.recipes[0],
        states.statement("dev-1", 1),
        signed,
        SealedState(FLEET, RUN_ID, 0, 0, length=2, digest_key=state.digest_key),
        StateFile(RUN_ID, 0, 0, 2, digest=state.digest, digest_key=state.digest_key),
        index,
    )
    return {type(message): [encode(message)] for message in found}


def certificate(states, round_, identities):
    """Return statements of the identities about the same states."""
    return StateCertificate(
        tuple(sign_statement(identity, states.statement(identity.name, round_)) for identity in identities)
    )
