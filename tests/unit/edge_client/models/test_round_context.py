"""The checkpoints that an upload carries."""

import pytest

from crypto.mask.derivation import derive
from edge_client.models.checkpoints import open_checkpoint
from edge_client.models.round_context import RoundContext
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode_prefix
from shoal.protocol.states import SealedCheckpoints, StateId
from tests.helpers.model_states import IDENTITIES, certificate, chain, origins, roster, vector

TASK = b"a task"


@pytest.fixture
def states():
    return origins(vector(1, 2), vector(3, 4), keys=chain().take())


def context(states, *models):
    """Return the context of the round after the origins', in which checkpoints of ``models`` are asked for."""
    keys = [run.take() for run in [chain()] for _ in range(2)][-1]
    return RoundContext(
        keys=keys,
        derive_mask=lambda: derive(keys.mask, keys.context(bytes(32), "permutation", ())),
        key_id=bytes(16),
        statement=b"",
        to_seal={model: states.held[StateId(model, 0)] for model in models},
        task=TASK,
    )


def test_checkpoints_are_in_order_of_models(states):
    """The checkpoints are in the order of their models each as long as the head says; unasked there are none."""
    assert context(states).attachment(IDENTITIES[0]) == []
    made = context(states, 1, 0)
    head, rest = decode_prefix(b"".join(made.attachment(IDENTITIES[0])), SealedCheckpoints)
    assert head.models == (0, 1)
    assert sum(head.sizes) == len(rest)
    signed = certificate(states, 1, IDENTITIES[:2])
    for model, size in zip(head.models, head.sizes, strict=True):
        sealed, rest = rest[:size], rest[size:]
        opened = {"keys": made.keys, "roster": roster(), "length": 2, "signers": 2, "most_task_bytes": 99}
        state, task = open_checkpoint(sealed, signed, wanted=StateId(model, 0), **opened)
        assert (state.digest, task) == (states.held[StateId(model, 0)].digest, TASK)
        with pytest.raises(UntrustedError):
            open_checkpoint(sealed, signed, wanted=StateId(1 - model, 0), **opened)


def test_text_shows_no_keys(states):
    """Keys and statement are not in the text of a context."""
    made = context(states, 0)
    secrets = (made.keys.mask.reveal(), made.keys.content, *(s.digest_key for s in made.to_seal.values()))
    assert [secret for secret in secrets if repr(secret) in repr(made) or secret.hex() in repr(made)] == []
