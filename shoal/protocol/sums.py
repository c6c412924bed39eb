"""What a device sends and receives in a run with a keeper; `shoal.protocol.cells` has what aggregator and keeper tell each other.

In such a run a device hides its update with a one-time pad (`crypto.sums`). It seals the pad's seed and its own figures to the
keeper (`KeeperShare`), and the sealed share travels in its upload. When a round closes, the aggregator divides the updates into
*cells*, one a model, and hands the keeper the shares of each (`OpenCells`). The keeper answers with the sum of the pads of a cell
and with the cell's figures (`CellSums`), so that the aggregator learns the sum of a cell, and nothing of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.protocol.codec import U16, U32, ArrayU16, ArrayU32, Fixed16, Fixed32, message
from shoal.protocol.documents import RunPlan, require_name
from shoal.protocol.messages import Phase, Sealed

MOST_CELLS: Final = 8
"""Most cells of a request: the unions of two requests are compared, 2^8 with 2^8 at most."""


@message(160)
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a device reports to the keeper alone; the fields are those of `shoal.protocol.messages.Upload`.

    Attributes:
        norm: l2 norm of the update as sent.
    """

    loss: float = 0.0
    correct: U32 = 0
    tested: U32 = 0
    norm: float = 0.0
    margins: tuple[float, ...] = ()


@message(161)
@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperShare:
    """A device's share for one keeper, sealed to it: the seed of the pad on its update, and its figures.

    Attributes:
        recipient: the keeper's seal key.
        model: the chosen candidate.
        length: coordinates of the update; 0 without one.
        pad: seed of the pad (`crypto.sums.ring.add_pad`), drawn for this upload.
        unit: the announcement's. All of a cell have the same, so that no update counts more than another.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    phase: Phase
    nonce: Fixed16
    device: str
    recipient: Fixed32
    model: U16
    length: U32
    pad: Fixed32
    figures: Figures
    unit: float = 0.0

    def __post_init__(self) -> None:
        require_name(self.device, "device name")

    def __repr__(self) -> str:
        return f"KeeperShare({self.device!r}, round {self.round}, <redacted>)"


@message(174)
@dataclass(frozen=True, slots=True)
class SumCodes:
    """What follows an opened sum on its way to devices: of how many updates it is, and its codes (`crypto.sums.codes`).

    Attributes:
        models: that its devices trained from; counts: of devices of each.
        codes: of each segment of the sum.
        unit: announced for the sum's round.
    """

    models: ArrayU16
    counts: ArrayU32
    codes: ArrayU32
    unit: float = 0.0


def precision_in(plan: RunPlan, unit: float) -> str:
    """Return the name of the encoding of updates in a round with this announced unit."""
    return plan.recipe.precision_up if unit or plan.keeper is None else "float32"


def share_head(fleet: str, device: str, keeper: str) -> Sealed:
    """Return the head of the envelope of a device's share."""
    return Sealed(fleet, "share", device, keeper)
