"""Checkpoints: nothing is used that the sealer chose alone."""

import dataclasses

import numpy as np
import pytest

import edge_client.models.checkpoints as module
from crypto.seal.envelope import seal_message_to_group
from crypto.seal.identity import Identity
from edge_client.models.checkpoints import CONTENT_LABEL, checkpoint_head, open_checkpoint, seal_checkpoint
from edge_client.models.states import ModelState
from shoal.errors import IntegrityError, ShoalError, UntrustedError
from shoal.protocol.codec import encode
from shoal.protocol.messages import Sealed
from shoal.protocol.states import SealedState, StateCertificate, StateId
from tests.helpers.model_states import (
    FLEET,
    IDENTITIES,
    RUN_ID,
    certificate,
    chain,
    origins,
    recipe,
    roster,
    step,
    vector,
)

STATE = StateId(0, 2)
LENGTH = 3


def keys_of(round_, version=1, first_round=1):
    keys = chain(version, first_round=first_round)
    keys.skip_to(round_)
    return keys.take()


def states():
    """Return states of a device in step after round 2."""
    steps = chain()
    start = origins(vector(1, 2, 3), keys=steps.take())
    made = start.apply(step(2, recipe(0, 2, (0, 0), mean=1.0)), {0: vector(1, 1, 1)}, steps.take())
    return made.keep({STATE})


KEYS = keys_of(3)
HELD = states()
CERTIFICATE = certificate(HELD, 3, IDENTITIES[:2])
SEALED = seal_checkpoint(IDENTITIES[0], KEYS, HELD.held[STATE]).payload


def open_(data=SEALED, signed=CERTIFICATE, **changes):
    fields = {"wanted": STATE, "keys": KEYS, "roster": roster(), "length": LENGTH, "signers": 2} | changes
    return open_checkpoint(data, signed, **fields)[0]


def sealed_by_hand(theta=(2, 3, 4), body=None, keys=KEYS, sender=IDENTITIES[0], head=None, **changes):
    """Return a checkpoint with any contents, sealed and signed as it should be."""
    fields = {
        "fleet": FLEET,
        "run_id": RUN_ID,
        "model": 0,
        "round": 2,
        "length": LENGTH,
        "digest_key": HELD.held[STATE].digest_key,
    } | changes
    body = np.array(theta, "<f4").tobytes() if body is None else body
    head = head or checkpoint_head(keys, STATE, sender.name)
    return seal_message_to_group(sender, module._group(keys), head, encode(SealedState(**fields)) + body).payload


def test_checkpoint_gives_the_sealed_state():
    """A checkpoint gives the state that was sealed."""
    opened = open_()
    assert opened.theta.tobytes() == HELD.held[STATE].theta.tobytes()
    assert opened.held == HELD.held[STATE].held
    assert opened.digest_key == HELD.held[STATE].digest_key
    assert open_(sealed_by_hand()).held == opened.held


def test_newcomer_under_a_later_version():
    """It can derive neither the keys of the state's round nor the digest's key."""
    newcomer = keys_of(3, version=2, first_round=3)
    sealed = seal_checkpoint(IDENTITIES[0], newcomer, HELD.held[STATE]).payload
    assert open_(sealed, keys=newcomer).held == HELD.held[STATE].held


def test_aggregator_learns_nothing():
    """The aggregator learns neither vector nor digest key."""
    assert HELD.held[STATE].theta.tobytes() not in SEALED
    assert HELD.held[STATE].digest_key not in SEALED


def lie():
    """Return the state's vector with another last bit in one coordinate."""
    theta = HELD.held[STATE].theta.copy()
    theta.view(np.uint32)[1] ^= 1
    return theta


EARLIER = ModelState.of(STATE, vector(1, 2, 3), run_id=RUN_ID, digest_key=keys_of(2).digest_key)
OTHER_FLEET = Sealed("other", checkpoint_head(KEYS, STATE, "dev-0").purpose, "dev-0", "*")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        # Sealed and signed as it should be.
        ({"data": sealed_by_hand(lie())}, UntrustedError, "0 devices of the roster have signed"),
        ({"data": sealed_by_hand(digest_key=bytes(32))}, UntrustedError, "0 devices"),
        ({"signed": certificate(HELD, 3, IDENTITIES[:1])}, UntrustedError, "1 devices"),
        ({"signed": StateCertificate(())}, UntrustedError, "0 devices"),
        ({"data": seal_checkpoint(IDENTITIES[0], KEYS, EARLIER).payload}, UntrustedError, "0 devices"),
        ({"keys": keys_of(4)}, UntrustedError, "another state, round or fleet"),
        ({"wanted": StateId(1, 2)}, UntrustedError, "another state, round or fleet"),
        ({"wanted": StateId(0, 1)}, UntrustedError, "another state, round or fleet"),
        ({"data": sealed_by_hand(head=OTHER_FLEET)}, UntrustedError, "another state, round or fleet"),
        *(
            ({"data": sealed_by_hand(**changes)}, IntegrityError, "another state than its envelope says")
            for changes in ({"fleet": "other"}, {"run_id": b"x" * 16}, {"model": 1}, {"round": 1})
        ),
        ({"data": sealed_by_hand(keys=dataclasses.replace(KEYS, content=bytes(32)))}, UntrustedError, None),
        ({"roster": roster(revoked=("dev-0",))}, UntrustedError, "not in the roster"),
        ({"data": sealed_by_hand(sender=Identity.generate("stranger"))}, UntrustedError, "not in the roster"),
        ({"data": sealed_by_hand(sender=Identity.generate("dev-0"))}, UntrustedError, None),
        *(
            ({"data": sealed_by_hand(**changes)}, IntegrityError, "for a model of 3 coordinates")
            for changes in (
                {"length": 2},
                {"length": 2**31},
                {"theta": (1, 2)},
                {"theta": (1, 2, 3, 4)},
                {"body": b"odd"},
                {"body": b""},
            )
        ),
    ],
)
def test_unfit_checkpoint_is_refused(given, error, words):
    """What the sealer chose alone, what is of another state, round, run or fleet, and another sender or length."""
    with pytest.raises(error, match=words):
        open_(**given)


def test_any_damaged_byte_is_refused():
    for at in range(len(SEALED)):
        damaged = bytearray(SEALED)
        damaged[at] ^= 1
        with pytest.raises(ShoalError):
            open_(bytes(damaged))
    for cut in (0, 7, 100, len(SEALED) - 1):
        with pytest.raises(ShoalError):
            open_(SEALED[:cut])


def test_too_long_is_refused_unopened(monkeypatch):
    """A checkpoint that is too long is refused before it is opened."""
    monkeypatch.setattr(module, "read_head", None)
    with pytest.raises(IntegrityError, match="for a model of 3 coordinates"):
        open_(SEALED + bytes(2048))


def test_infinite_coordinates_are_refused():
    """Even if enough devices have signed them."""
    theta = vector(1, np.nan, 3)
    bad = HELD.with_states([ModelState.of(STATE, theta, run_id=RUN_ID, digest_key=HELD.held[STATE].digest_key)])
    with pytest.raises(IntegrityError, match="NaN"):
        open_(seal_checkpoint(IDENTITIES[0], KEYS, bad.held[STATE]).payload, certificate(bad, 3, IDENTITIES[:2]))


def test_label_is_that_of_devices_and_owner():
    assert CONTENT_LABEL == "content"
