"""Updates and means of a simulated run in the plan's precision, with each device's residual, and the bytes that they take.

A fleet's functions encode and decode, so a simulated device adds the residuals that a real one would. Residuals are not stored
in a checkpoint of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crypto.mask.masking import mask as masked_under
from edge_client.learning.feedback import encode_update, residual_for, with_residual
from edge_client.storage.pending_upload import Residual
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.precision.seeds import mean_seed, upload_seed
from shoal.types import KEY_ID_BYTES

if TYPE_CHECKING:
    from aggregator.strategies.base import RoundPlan
    from crypto.mask.derivation import MaskKey
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector


class Links:
    """The links of all devices of a run.

    Attributes:
        exact: if not None, device -> the masked update of the last round before it was rounded, (d,) float32.
        up: bytes of all encoded updates so far, and their number; down: the same of the means that devices fetched.
        ring: in a run on sums the encoding of updates, which are rounded when they are added up; empty in any other.
    """

    def __init__(self, run: RunPlan) -> None:
        """Begin at round 1 of ``run``."""
        self._run = run
        self._residuals: dict[str, Residual] = {}
        self._moved: dict[int, int] = {}
        self.exact: dict[str, Float32Vector] | None = None
        self.ring = ""
        self.up = (0, 0)
        self.down = (0, 0)

    def open_round(self, plan: RoundPlan) -> None:
        """Count the means that devices fetch for a round: of the models in their assignments that moved in the last one."""
        if self.exact is not None:
            self.exact.clear()
        for assignment in plan.assignments.values():
            fetched = [self._moved[model] for model in assignment.models if model in self._moved]
            self.down = self.down[0] + sum(fetched), self.down[1] + len(fetched)
        self._moved = {}

    def update(
        self, clear: Float32Vector, mask: MaskKey | None, *, device: str, model: int, phase: int, round_: int
    ) -> Float32Vector:
        """Return the masked update (d,) float32 as the aggregator decodes it, and hold the residual that it leaves.

        Args:
            clear: the device's update.
            mask: of the round; None if vectors are clear.
            device: its name.
            model: that it trained from.
            phase: of its assignment.
            round_: the round.
        """
        run = self._run
        if self.ring or run.recipe.precision_up == "float32":
            self.up = self.up[0] + encoded_bytes(len(clear), self.ring or "float32"), self.up[1] + 1
            return clear if mask is None else masked_under(clear, mask).values
        stored = residual_for(self._residuals.pop(device, None), run.run_id, round_, b"")
        seed = upload_seed(run.run_id, round_, phase, device)
        sent = with_residual(clear, stored, model, phase)
        encoded = encode_update(sent, mask, run.recipe.precision_up, seed)
        self.up = self.up[0] + len(encoded.body), self.up[1] + 1
        if self.exact is not None:
            self.exact[device] = sent if mask is None else masked_under(sent, mask).values
        if encoded.residual is not None:
            transfer = bytes(KEY_ID_BYTES)
            self._residuals[device] = Residual.of(
                encoded.residual, run_id=run.run_id, round_=round_, model=model, transfer=transfer
            )
        return encoded.masked

    def mean(self, vector: Float32Vector, *, model: int, round_: int) -> Float32Vector:
        """Return a masked mean, float32, as devices decode it."""
        precision = self._run.recipe.precision_down
        self._moved[model] = encoded_bytes(len(vector), precision)
        if precision == "float32":
            return vector
        seed = mean_seed(self._run.run_id, round_, model)
        return decode(encode(vector, precision, seed), len(vector), precision)
