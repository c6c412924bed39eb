"""What devices sign and seal about the model states that they hold, with digests and contents that the test makes up."""

from functools import cache

from crypto.seal.envelope import GroupKey, seal_to_group
from crypto.seal.identity import Identity
from shoal.membership.statements import sign_statement
from shoal.protocol.codec import encode
from shoal.protocol.messages import Sealed
from shoal.protocol.states import NO_TRANSCRIPT, HeldState, SealedCheckpoints, Statement, checkpoint_purpose

CONTENT = GroupKey("demo", "content", bytes(32))


@cache
def identity(name):
    """Return a party's keys; the same ones in each test."""
    return Identity.generate(name)


def digest(state, kind=0):
    """Return a digest of a state; another ``kind`` is that of other bits."""
    return bytes([kind, state.model % 256]) + state.round.to_bytes(30, "big")


def signed_statement(device, run, round_, states, *, kinds=None, signer=None, head=NO_TRANSCRIPT):
    """Return the statement of a device that holds ``states``.

    Args:
        device: its name.
        run: the run plan.
        round_: the round of the statement.
        states: the states that it names.
        kinds: state -> kind, for those of which the device has other bits; see `digest`.
        signer: its keys, instead of those of `identity`.
        head: the run's transcript.
    """
    device = str(device)
    named = tuple(HeldState(s.model, s.round, digest(s, (kinds or {}).get(s, 0))) for s in sorted(states))
    return sign_statement(signer or identity(device), Statement(run.fleet, run.run_id, round_, device, named, head))


def sealed_checkpoints(device, run, round_, states, signer=None):
    """Return what a device attaches that seals ``states``, pairs (model, state); ``signer`` as in `signed_statement`."""
    device = str(device)
    envelopes = []
    for _, state in states:
        head = Sealed(run.fleet, checkpoint_purpose(run.run_id, round_, state), device, "*")
        envelopes.append(seal_to_group(signer or identity(device), CONTENT, head, b"state"))
    sealed = SealedCheckpoints(tuple(m for m, _ in states), tuple(len(e) for e in envelopes))
    return encode(sealed) + b"".join(envelopes)
