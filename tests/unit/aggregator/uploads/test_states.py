"""The transition table of an upload."""

import itertools

import pytest

from aggregator.storage.store import UploadRef
from aggregator.uploads.states import (
    ANSWERED,
    TRANSITIONS,
    TransitionError,
    UploadEvent,
    UploadState,
    UploadTable,
)

REF = UploadRef("dev-1", b"t" * 16)
PATHS = {
    UploadState.RECEIVING: (),
    UploadState.VERIFYING: (UploadEvent.COMPLETE,),
    UploadState.VALID: (UploadEvent.COMPLETE, UploadEvent.VALIDATED),
    UploadState.COMMITTING: (UploadEvent.COMPLETE, UploadEvent.VALIDATED, UploadEvent.COMMIT_STARTED),
    UploadState.ACKNOWLEDGED: (
        UploadEvent.COMPLETE,
        UploadEvent.VALIDATED,
        UploadEvent.COMMIT_STARTED,
        UploadEvent.COMMITTED,
    ),
    UploadState.REFUSED: (UploadEvent.REJECTED,),
}
"""Events that lead to each state."""


def table_in(state):
    table = UploadTable()
    for event in PATHS[state]:
        table.move(REF, event)
    assert table.state(REF) is state
    return table


def test_every_state_has_a_path():
    assert set(PATHS) == set(UploadState)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(UploadState, UploadEvent)])
def test_only_listed_transitions_are_allowed(state, event):
    table = table_in(state)
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(TransitionError, match=f"{event.name} is not allowed for the {state.value} upload of dev-1"):
            table.move(REF, event)
        assert table.state(REF) is state
    else:
        assert table.move(REF, event) is after
        assert table.state(REF) is after


def test_answer_never_changes():
    """An answered upload never changes its answer."""
    assert all(after is UploadState.RECEIVING for (before, _), after in TRANSITIONS.items() if before in ANSWERED)


def test_two_topics_are_two_uploads():
    """Uploads of one transfer id on two topics are two uploads."""
    assert table_in(UploadState.REFUSED).state(UploadRef("dev-2", REF.transfer)) is UploadState.RECEIVING


def test_reason_of_a_refusal_is_remembered():
    table = UploadTable()
    table.move(REF, UploadEvent.REJECTED, "the round is not open")
    assert table.reason(REF) == "the round is not open"
    assert table.reason(UploadRef("dev-2", REF.transfer)) == ""


def test_oldest_answers_are_forgotten_first():
    """The oldest answers are forgotten first and uploads in progress never."""
    table = UploadTable(answers_remembered=2)
    table.move(REF, UploadEvent.COMPLETE)
    table.move(REF, UploadEvent.VALIDATED)
    others = [UploadRef(f"dev-{n}", REF.transfer) for n in range(2, 6)]
    for other in others:
        table.move(other, UploadEvent.FOUND_STORED)
    assert table.state(REF) is UploadState.VALID
    states = [table.state(other) for other in others]
    assert states == [UploadState.RECEIVING] * 2 + [UploadState.ACKNOWLEDGED] * 2
