"""The comparison of an announced history of a run with what this device and others know of it, as a pure function.

The transcript of a run is a hash chain over its announcements (`TranscriptEntry`), so a device that took part in the round before
recomputes the announced head. A device that missed rounds can't. It takes the head if enough devices have signed a head that the
announced one follows from: in the round before, in the same round, or in an earlier one whose later entries are announced.

Example: dev-3 knows the head of round 4 and is shown round 9. Three devices have signed a head of round 8, and its hash with the
entry of round 9 is the announced head.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from edge_client.models.store import OWN_FORK, Transcript
from shoal.errors import ForkedHistoryError, MissingStateError, ShoalError
from shoal.membership.statements import FEWEST_SIGNERS, Claim, open_statement, read_claims, signers_needed
from shoal.protocol.codec import decode
from shoal.protocol.states import NO_TRANSCRIPT, RoundModels, TranscriptEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shoal.protocol.documents import Roster, RunPlan

LEFT_HINT: Final = (
    "the aggregator was restored from a backup, or cheats, or devices lie: tell the owner; the device leaves this run"
)
UNSIGNED_HINT: Final = "wait: the device takes part once enough devices have signed this history"


class SignedElsewhereError(ForkedHistoryError):
    """As many devices as certify a state have signed another history than the announced one."""


def check_history(
    plan: RunPlan,
    roster: Roster,
    round_: int,
    held: RoundModels,
    *,
    known: Transcript,
    began: bool,
) -> tuple[str, ...]:
    """Return the devices that have signed another history than the announced one, in name order; too few to believe.

    Args:
        plan: of the run.
        roster: the newest roster.
        round_: the announced round.
        held: its models.
        known: the transcript as this device knows it.
        began: whether the device has the run's origins; else no history from the beginning tells it anything.

    Raises:
        SignedElsewhereError: `signers_needed` devices, at least two, have signed one and the same other head.
        ForkedHistoryError: the announcement does not continue this device's own history, or the device has left the run.
        MissingStateError: the device missed rounds, and too few devices have signed the announced history.
    """
    claims = tuple(read_claims(held.statements))
    heads = _implied(plan, roster, round_, held, claims, known)
    seen, gone = known.head in heads.values(), known.round >= OWN_FORK
    follows = seen and (known.head != NO_TRANSCRIPT or (began and not known.round))
    error = f"round {round_} belongs to another history of run {plan.run}"
    if known.round == OWN_FORK or (not gone and not seen and (known.round >= round_ - 1 or known.round in heads)):
        raise ForkedHistoryError(f"{error} than this device has seen", hint=LEFT_HINT)
    agree, others = _compared(plan, roster, claims, {known.round: known.head, **heads}, count=not follows)
    needed = signers_needed(plan.recipe.min_contributors, roster.only(plan.recipe.only).active_count)
    most = max(map(len, others.values()), default=0)
    if most >= max(FEWEST_SIGNERS, needed):
        raise SignedElsewhereError(f"{error} than {most} devices have signed", hint=LEFT_HINT)
    believed = follows or len(agree) >= needed
    # Perhaps a device that lied has made this one leave. The aggregator can't revoke it, so it can't undo its own lie.
    if gone and not (believed and roster.revoked):
        raise ForkedHistoryError(f"{error} than this device or others have seen", hint=LEFT_HINT)
    if not believed:
        signed = f"{len(agree)} devices have signed the history of round {round_}, and {needed} must"
        raise MissingStateError(f"{signed}, since this device missed the rounds before", hint=UNSIGNED_HINT)
    return tuple(sorted(set().union(*others.values())))


def certifying(plan: RunPlan, roster: Roster, round_: int, held: RoundModels, known: Transcript) -> tuple[Claim, ...]:
    """Return the announced statements that may certify a state, not verified yet: those of the announced history.

    Of a round whose head this device can't compute, at most one head is right: it takes that of most statements.
    """
    claims = tuple(read_claims(held.statements))
    heads = _implied(plan, roster, round_, held, claims, known)
    said: dict[int, Counter[bytes]] = defaultdict(Counter)
    for claim in claims:
        said[claim.statement.round][claim.statement.transcript] += 1
    right = {at: found.most_common(1)[0][0] for at, found in said.items()} | heads
    return tuple(c for c in claims if right[c.statement.round] == c.statement.transcript)


def _implied(
    plan: RunPlan, roster: Roster, round_: int, held: RoundModels, claims: Iterable[Claim], known: Transcript
) -> dict[int, bytes]:
    """Return round -> head, for the rounds whose head follows from the announced one."""
    newest = held.steps[-1] if held.steps else None
    links = {link.digest: link for link in _links(plan, held)}
    before: dict[bytes, Claim | int] = {claim.statement.transcript: claim for claim in claims}
    before |= {digest: link.round for digest, link in links.items()}
    if known.round < OWN_FORK:
        before[known.head] = known.round
    else:
        before.setdefault(known.head, known.round)  # which round that was is not stored
    heads = {round_: held.transcript}
    at = round_
    for head, source in before.items():
        entry = TranscriptEntry(
            previous=head,
            fleet=plan.fleet,
            run_id=plan.run_id,
            round=round_,
            offers=held.offers,
            step=None if newest is None else newest.step,
            means=() if newest is None else tuple(mean.digest for mean in newest.means),
        )
        if entry.digest != held.transcript:
            continue
        if isinstance(source, Claim) and not _is_signed(source, plan, roster):
            continue  # its round may be false
        at = source.statement.round if isinstance(source, Claim) else source
        heads[at] = head
    while (link := links.get(heads[at])) is not None and link.round <= at:
        at = link.round - 1
        heads[at] = link.previous
    return heads


def _links(plan: RunPlan, held: RoundModels) -> Iterable[TranscriptEntry]:
    """Yield the entries of earlier rounds that are announced among the statements."""
    for blob in held.statements:
        try:
            entry = decode(blob, TranscriptEntry)
        except ShoalError:
            continue  # a statement
        if (entry.fleet, entry.run_id) == (plan.fleet, plan.run_id):
            yield entry


def _compared(
    plan: RunPlan, roster: Roster, claims: Iterable[Claim], heads: dict[int, bytes], *, count: bool
) -> tuple[set[str], dict[tuple[int, bytes], set[str]]]:
    """Return the devices that have signed ``heads`` (verified only if they ``count``), and those of each other head."""
    agree: set[str] = set()
    others: dict[tuple[int, bytes], set[str]] = defaultdict(set)
    for claim in claims:
        said = claim.statement
        same = heads.get(said.round) == said.transcript
        if said.round not in heads or (same and not count) or not _is_signed(claim, plan, roster):
            continue
        (agree if same else others[said.round, said.transcript]).add(said.device)
    return agree, others


def _is_signed(claim: Claim, plan: RunPlan, roster: Roster) -> bool:
    """Return whether a device of the roster has signed a claim about the plan's run; a forged one shows nothing."""
    said = claim.statement
    if (said.fleet, said.run_id) != (plan.fleet, plan.run_id):
        return False
    try:
        open_statement(claim.signed, roster)
    except ShoalError:
        return False
    return True
