"""Whether this aggregator's own history of the run is the odd one, as after the restore of an old backup.

Devices sign the run's transcript in their uploads and presences. One that signs another transcript lies, or fails. As many as
certify a state, with one and the same other transcript, know better: no device is to blame.

Example: an aggregator is restored at round 4 from a backup. Three devices state one head of round 9, which it has not reached.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from aggregator.rounds.quorum_and_deadline import certifiers
from shoal.membership.statements import FEWEST_SIGNERS
from shoal.protocol.states import FORKED_ROUND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aggregator.rounds.state import EngineState
    from shoal.protocol.states import TranscriptHead

ODD_HINT: Final = (
    "this aggregator was restored from an old backup, or another one has served the run: put back its newest directory, or end "
    "the run with shoal-fleet run stop and sign another; no device is to blame"
)


def odd_history(state: EngineState, heads: Mapping[str, TranscriptHead]) -> str:
    """Return that enough devices have signed one and the same other history; empty if they have not.

    Args:
        state: of the engine.
        heads: device -> the newest head in its presence.
    """
    ours = (state.head, state.held.transcript)
    signers: dict[tuple[int, bytes], set[str]] = defaultdict(set)
    for device, other in state.others.items():
        signers[state.round, other].add(device)
    for device, head in heads.items():
        # A device that has left the run states the last head that it knew, which may be ours.
        later = head.round > state.round if head.round != FORKED_ROUND else head.transcript not in ours
        other_now = head.round == state.round and state.plan is not None and head.transcript != state.head
        if head.run_id == state.run.run_id and device in state.devices and (later or other_now):
            signers[head.round, head.transcript].add(device)
    most = max(map(len, signers.values()), default=0)
    if state.finished or most < max(FEWEST_SIGNERS, certifiers(state)):
        return ""
    return f"{most} devices have signed another history of run {state.run.run} than this aggregator has"
