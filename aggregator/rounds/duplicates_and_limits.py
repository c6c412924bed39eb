"""The treatment of an authentic upload: stored, a duplicate, or refused with a reason.

- Exactly once: the first upload of (run, round, phase, device) counts. The same upload again is a duplicate, which is
  acknowledged once more; any other upload of the device is refused.
- An upload must be for the open round, and be no more than its assignment asked for.
- Figures beyond the limits here are refused: squares and sums of them must stay finite.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from aggregator.rounds.state import EngineState, too_late, unit_in
from aggregator.strategies.base import ClientUpdate
from crypto.sums.codes import CHECKS
from shoal.errors import ShoalError
from shoal.limits import MAX_FIGURE, MAX_MARGIN, SKETCH_WORDS
from shoal.membership.statements import peek_statement
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Upload
from shoal.protocol.sums import precision_in

OTHER_HISTORY: Final = "the device has signed another history of the run than the announced one"


class Decision(Enum):
    """The treatment of an authentic upload."""

    STORE = "store"
    DUPLICATE = "duplicate"
    REFUSE = "refuse"


Verdict = tuple[Decision, str]
"""A decision and, for a refusal, its reason."""


def decide(
    state: EngineState, upload: Upload, digest: bytes, pending: bytes | None, *, nonce: bytes, most_attached: int
) -> Verdict:
    """Return whether an authentic upload may be stored.

    Args:
        state: of the run; it stays as it is.
        upload: the upload's header.
        digest: the upload's digest.
        pending: digest of the device's upload that is valid and not durable yet, None without one.
        nonce: of the open round.
        most_attached: bytes that the device may attach to its upload.
    """
    run, plan = state.run, state.plan
    if (upload.run, upload.run_id, upload.task_digest) != (run.run, run.run_id, run.task_digest):
        return Decision.REFUSE, "of another run or task"
    # Every round has its own key, whose id the aggregator does not know: the close compares the keys of its updates.
    if upload.mode != run.recipe.mode or upload.key_version != state.held.key_version:
        return Decision.REFUSE, "masked under another key or mode"
    if plan is None or upload.round != state.round or upload.nonce != nonce:
        return _decide_late(state, upload, digest)
    assignment = plan.assignments.get(upload.device)
    if assignment is None or assignment.phase != upload.phase:
        return Decision.REFUSE, "not asked for"
    duplicate = _duplicate(state, upload, digest, pending)
    if duplicate is not None:
        return duplicate
    if other_head(state, upload):
        return Decision.REFUSE, OTHER_HISTORY
    wrong = _beyond_assignment(run, assignment, upload, most_attached) or _wrong_figures(run, assignment, upload)
    if run.keeper is not None and upload.precision != (asked := precision_in(run, unit_in(state))):
        wrong = f"an update in {upload.precision[:16]}, in a round of {asked}"
    return (Decision.REFUSE, wrong) if wrong else (Decision.STORE, "")


def other_head(state: EngineState, upload: Upload | ClientUpdate) -> bytes:
    """Return the transcript in the statement of an upload to the open round if it is not the run's; empty if it is.

    Of several transcripts of one round at most one is that of the fleet: a statement with another is no evidence of anything.
    """
    try:
        found = peek_statement(upload.statement).transcript
    except (ShoalError, ValueError):
        return b""
    return b"" if upload.round != state.round or found == state.head or not state.head else found


def _duplicate(state: EngineState, upload: Upload, digest: bytes, pending: bytes | None) -> Verdict | None:
    """Return the decision on a further upload of a device in the open round; None for the first."""
    stored = state.received.get(upload.device)
    if stored is not None:
        same = stored == (upload.phase, digest)
        return (Decision.DUPLICATE, "") if same else (Decision.REFUSE, "another upload was stored before")
    if pending is not None:
        return (Decision.DUPLICATE, "") if pending == digest else (Decision.REFUSE, "another upload came before")
    return None


def _decide_late(state: EngineState, upload: Upload, digest: bytes) -> Verdict:
    """Return the decision on an upload for a round that is not open; a finished run acknowledges its last uploads."""
    known = state.finished and state.received.get(upload.device) == (upload.phase, digest)
    return (Decision.DUPLICATE, "") if known else (Decision.REFUSE, too_late(state))


def _beyond_assignment(run: RunPlan, assignment: Assignment, upload: Upload, most_attached: int) -> str:
    """Return in what the upload is not the one that was asked for; empty if it is."""
    if upload.model not in assignment.scored:
        return "trained from a model that was not offered"
    if upload.length != (run.length if assignment.train else 0):
        return f"a vector of length {upload.length}"
    if len(upload.parts) != (len(run.workers) if assignment.train else 0):
        return f"an update in {len(upload.parts)} parts"
    # A device that holds no state to seal sends its update alone.
    if upload.attached > most_attached:
        return f"{upload.attached} bytes attached to the update"
    if len(upload.margins) != (assignment.figures if run.keeper is None else 0):
        return f"{len(upload.margins)} margins"
    if upload.nearest not in (assignment.compare or (0,)):
        return f"nearest to model {upload.nearest}, which was not to be compared with"
    if bool(upload.share) != (run.keeper is not None):
        return f"a share for a keeper of {len(upload.share)} bytes"
    if len(upload.sketch) != (4 * SKETCH_WORDS if run.looks and upload.length else 0):
        return f"a sketch of {len(upload.sketch)} bytes"
    if len(upload.checks) != (CHECKS * len(run.segments) if run.keeper is not None and upload.length else 0):
        return f"{len(upload.checks)} codes of the update"
    return ""


def _wrong_figures(run: RunPlan, assignment: Assignment, upload: Upload) -> str:
    """Return why the upload's figures can't be true, or what is beyond their limits; empty if nothing is."""
    if run.keeper is not None:
        told = (upload.loss, upload.correct, upload.tested, upload.samples)
        return f"figures {told} that are for the keeper alone" if any(told) else ""
    if (
        upload.correct > upload.tested
        or bool(upload.tested) != assignment.evaluate
        or (assignment.train and not upload.samples)
    ):
        return "impossible counts"
    if run.recipe.weighting == "uniform" and upload.samples > 1:
        return f"{upload.samples} samples where the plan's weighting is uniform"
    if abs(upload.loss) > MAX_FIGURE or any(abs(m) > MAX_MARGIN for m in upload.margins):
        return "a loss or a margin beyond the limit for reports"
    if not (0 < upload.model_norm <= MAX_FIGURE if assignment.norm else upload.model_norm == 0):
        return "a model's norm that was not asked for, or an impossible one"
    return ""
