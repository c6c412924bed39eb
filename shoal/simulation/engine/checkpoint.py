"""Checkpoints of a simulated run: a run of hours can be stopped and resumed, and gives the same bits.

All random draws of a round follow from the seed and the round's number. So the whole state is the strategy's state, with the
updates that it still needs, and the history so far.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.rounds.closing import Watched
from aggregator.strategies.base import Event
from shoal.errors import DocumentError, IntegrityError
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPlan
from shoal.simulation.data import Population
from shoal.simulation.engine.models import HeldStates
from shoal.simulation.engine.records import SimRound
from shoal.util.files import write_atomic
from shoal.util.state_codec import decode_state, encode_state

S = TypeVar("S")
VERSION: Final = 7
SAVE_EVERY_S: Final = 60.0
"""Least seconds between two checkpoints."""
_DOCUMENT: Final = "document"
_ARRAY: Final = "array/"
_MODEL: Final = "model/"


@dataclass(slots=True)
class ResumePoint:
    """A simulated run between two rounds, without the strategy's state: what its rounds have given so far.

    Attributes:
        round: rounds so far; spent: rounds of abandoned starts among them.
        clusters: each device's cluster.
        history, starts: rounds of the current start, and of each earlier one.
        events: events of all rounds, each with its counted round.
        uncounted_s, uncounted_events: CPU seconds and events of the rounds since the last counted one.
        watched: see `aggregator.rounds.closing`.
    """

    round: int = 0
    spent: int = 0
    clusters: Mapping[str, int] = field(default_factory=dict)
    history: list[SimRound] = field(default_factory=list)
    starts: list[list[SimRound]] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)
    uncounted_s: float = 0.0
    uncounted_events: tuple[Event, ...] = ()
    watched: Watched = field(default_factory=Watched)


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of a checkpoint file besides arrays.

    Attributes:
        version: `VERSION`.
        run: the run's `fingerprint`; data: its devices' `data_digest`.
        point: the run between two rounds.
        strategy: the strategy's state, encoded; models: the states that devices hold.
    """

    version: int
    run: str
    data: str
    point: ResumePoint
    strategy: Any
    models: Any


def fingerprint(run: RunPlan, start: NDArray[np.float32], arrivals: Mapping[str, int] | None = None) -> str:
    """Return a run's identity: the hex SHA-256 of its plan, its origins (origins, d), float32, and arrivals."""
    late = json.dumps(arrivals, sort_keys=True).encode() if arrivals else b""
    return hashlib.sha256(encode(run) + np.ascontiguousarray(start, "<f4").tobytes() + late).hexdigest()


def data_digest(population: Population) -> str:
    """Return the identity of the devices' data: the hex SHA-256 of their names and training samples.

    An experiment's own settings, such as the number of groups, are in no run plan, but they change the data.
    """
    digest = hashlib.sha256()
    for name, shard in zip(population.names, population.train, strict=True):
        digest.update(f"{name} {shard.x.shape} {shard.y.shape}".encode())
        for samples in (shard.x, shard.y):
            digest.update(np.ascontiguousarray(samples).data)
    return digest.hexdigest()


def save(path: Path, name: str, data: str, point: ResumePoint, state: Any, models: HeldStates) -> None:
    """Write a checkpoint atomically.

    Args:
        path: the file; an existing one is replaced.
        name: the run's `fingerprint`.
        data: the devices' `data_digest`.
        point: the simulator's state.
        state: the strategy's state.
        models: the states that devices hold.
    """
    strategy, held = encode_state(state), encode_state(models)
    file = encode_state(
        _File(version=VERSION, run=name, data=data, point=point, strategy=strategy.document, models=held.document)
    )
    # The document is JSON in an array of bytes: the file then needs no pickle, and loads with allow_pickle=False.
    document = np.frombuffer(json.dumps(file.document).encode(), np.uint8)
    buffer = io.BytesIO()
    arrays = {_ARRAY + k: v for k, v in strategy.arrays.items()} | {_MODEL + k: v for k, v in held.arrays.items()}
    np.savez(buffer, **{_DOCUMENT: document, **arrays})  # type: ignore[arg-type]  # numpy's stub takes the second argument for a flag
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def load(path: Path, name: str, data: str, state_type: type[S]) -> tuple[ResumePoint, S, HeldStates] | None:
    """Return the simulator's, the strategy's and the models' state, or None if there is no checkpoint at ``path``.

    Args:
        path: see `save`.
        name: the `fingerprint` of the run to resume.
        data: its `data_digest`.
        state_type: class of the strategy's states.

    Raises:
        IntegrityError: the file is damaged, or belongs to another version or run.
    """
    if not path.exists():
        return None
    damaged = IntegrityError(f"{path} is no checkpoint, or is damaged", hint="remove it to begin anew")
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        document = json.loads(arrays.pop(_DOCUMENT).tobytes())
        version = document["version"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise damaged from error
    if version != VERSION:
        raise IntegrityError(
            f"{path} is of version {version}, not {VERSION}", hint="finish the run with the version that wrote it"
        )
    try:
        kept = decode_state(_File, document)
        if (kept.run, kept.data) != (name, data):
            raise IntegrityError(
                f"{path} is of another run", hint="give the options of the run that it is from, or another file"
            )
        vectors, held = (
            {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            for prefix in (_ARRAY, _MODEL)
        )
        models = decode_state(HeldStates, kept.models, held)
        return kept.point, decode_state(state_type, kept.strategy, vectors), models
    except DocumentError as error:
        raise damaged from error
