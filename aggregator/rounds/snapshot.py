"""The two parts of a run's snapshot as one encoded state: the strategy's state and the models.

`ResumeMetadata` is the engine's part of a snapshot, which a restarted aggregator needs besides the strategy's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aggregator.rounds.closing import Watched
from aggregator.rounds.held_models import HeldModels
from aggregator.strategies.base import Event
from shoal.errors import DocumentError
from shoal.types import Float32Vector
from shoal.util.state_codec import Encoded, decode_state, encode_state


@dataclass(frozen=True, slots=True)
class ResumeMetadata:
    """The engine's part of a snapshot.

    Attributes:
        key_version: of the open round.
        watched: see `aggregator.rounds.closing`.
        news: events since the last round closed.
        silent: devices that left rounds unanswered.
    """

    key_version: int
    watched: Watched = field(default_factory=Watched)
    news: tuple[Event, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)


PARTS: Final = ("strategy", "held")


def dump(state: Any, held: HeldModels) -> Encoded:
    """Return a strategy's state between two rounds, and the models, as one document with its vectors.

    Raises:
        DocumentError: a part holds something else than its type hints say.
    """
    parts = dict(zip(PARTS, (encode_state(state), encode_state(held)), strict=True))
    return Encoded(
        {name: [part.document, sorted(part.arrays)] for name, part in parts.items()},
        {f"{name}/{at}": array for name, part in parts.items() for at, array in part.arrays.items()},
    )


def load(kind: type[Any], document: Any, vectors: Mapping[str, Float32Vector]) -> tuple[Any, HeldModels]:
    """Return the strategy's state and the models that `dump` encoded.

    Args:
        kind: the strategy's ``state_type``.
        document: the encoded state.
        vectors: its arrays.

    Raises:
        DocumentError: the document or the vectors do not describe them.
    """
    if not isinstance(document, dict) or set(document) != set(PARTS):
        raise DocumentError("the snapshot lacks the strategy's state or the models")
    (strategy, its_arrays), (held, arrays) = (document[name] for name in PARTS)
    state = decode_state(kind, strategy, {at: vectors[f"strategy/{at}"] for at in its_arrays})
    return state, decode_state(HeldModels, held, {at: vectors[f"held/{at}"] for at in arrays}, mixed=True)
