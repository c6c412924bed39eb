"""The histories of a run that devices have seen, compared by the heads of the transcript in their presences.

Example: pi-1 and pi-2 give one head for round 20 of run 3, and pi-3 gives another. The aggregator has shown two histories,
or one of the devices lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.states import FORKED_ROUND

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.states import TranscriptHead


def open_presence(sealed: bytes | memoryview, device: str, fleet: FleetDirectory) -> Presence:
    """Return a device's presence.

    Raises:
        UntrustedError: it is not the presence of a device in the roster, or under keys that the owner no longer has.
        SealError, WireError: it is altered or malformed.
    """
    member, (head, at) = fleet.roster.device(device), read_head(sealed)
    if member is None or head != channels.PRESENCE.head(fleet.name, device):
        raise UntrustedError(f"no presence of {device}")
    for version in fleet.versions:
        try:
            group = GroupKey(fleet.name, "broadcast", version.broadcast_key)
            presence = decode(open_from_group(group, sealed, head, at, member.sign_key), Presence)
        except SealError:
            continue
        if presence.device == device:
            return presence
    raise UntrustedError(f"a presence of {device} that is forged, or under keys that the owner does not have")


def disagreements(
    heads: Mapping[str, TranscriptHead],
    plans: Mapping[bytes, RunPlan],
    contrary: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Return a sentence for each round of which parties give different heads, and for each device that has left its run.

    A device that states the head of a round that its run can't have is named too.

    Args:
        heads: party -> its head; that of the aggregator is in its announcement.
        plans: run id -> plan, of the owner's runs; heads of other runs are left out.
        contrary: party -> the devices that have signed another history or state than it was shown, as its presence names them.
    """
    seen: dict[tuple[int, int], dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    found = []
    for party, head in sorted(heads.items()):
        plan = plans.get(head.run_id)
        if plan is None:
            continue
        run = plan.run
        if head.round == FORKED_ROUND:
            found.append(
                f"{party} has left run {run}: the aggregator has shown it another history than before or than others"
            )
        elif head.round > plan.recipe.rounds + 1:
            found.append(
                f"{party} states the history of round {head.round} of run {run}, which has {plan.recipe.rounds} rounds"
            )
        else:
            seen[run, head.round][head.transcript].append(party)
    for (run, round_), parties in sorted(seen.items()):
        if len(parties) > 1:
            groups = "; ".join(", ".join(names) for names in parties.values())
            found.append(f"two histories of run {run}: the heads of round {round_} differ between {groups}")
    against: dict[str, list[str]] = defaultdict(list)
    for party, devices in sorted((contrary or {}).items()):
        for device in devices:
            against[device].append(party)
    for device, told in sorted(against.items()):
        were = "was" if len(told) == 1 else "were"
        found.append(f"{device} has signed another history or state than {', '.join(told)} {were} shown")
    return found
