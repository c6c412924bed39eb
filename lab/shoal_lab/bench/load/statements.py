"""Signed statements of uploads that the load benchmarks make without devices.

The aggregator compares the digests of states and can't compute one, since it holds no model. So a digest of the state's name
takes the place of a digest of the model, the same for every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from crypto.seal.identity import Identity
from shoal.membership.statements import sign_statement
from shoal.protocol.documents import RunPlan
from shoal.protocol.states import HeldState, StateId, Statement


def signed_statement(identity: Identity, plan: RunPlan, round_: int, states: Iterable[StateId], head: bytes) -> bytes:
    """Return the statement of a device that holds ``states`` in a round with the transcript ``head``, signed by ``identity``."""
    held = tuple(_held(plan.run_id, state) for state in sorted(states))
    said = Statement(plan.fleet, plan.run_id, round_, identity.name, states=held, transcript=head)
    return sign_statement(identity, said)


def _held(run_id: bytes, state: StateId) -> HeldState:
    digest = hashlib.sha256(run_id + state.model.to_bytes(4, "little") + state.round.to_bytes(4, "little")).digest()
    return HeldState(state.model, state.round, digest)
