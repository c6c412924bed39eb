"""Checkpoints of a simulated run: a run of hours can be stopped and resumed, and gives the same bits.

All random draws of a round follow from the seed and the round's number. So the whole state is the strategy's own dump, the
history so far, and the updates that the strategy still refers to.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.base import Contribution, Dump, Event, UploadKey
from shoal.errors import IntegrityError
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Phase
from shoal.simulation.data import Population
from shoal.simulation.engine.records import SimRound
from shoal.types import Float32Vector
from shoal.util.files import write_atomic

VERSION: Final = 2
SAVE_EVERY_S: Final = 60.0
"""Least seconds between two checkpoints."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The simulator's own state between two rounds.

    Attributes:
        round: rounds so far; spent: rounds of abandoned starts among them.
        clusters: each device's cluster.
        history, starts: rounds of the current start, and of each earlier one.
        events: events of all rounds, each with its counted round.
        uncounted_s, uncounted_events: CPU seconds and events of the rounds since the last counted one.
        levels: see `aggregator.rounds.screening`.
    """

    round: int
    spent: int
    clusters: Mapping[str, int]
    history: tuple[SimRound, ...]
    starts: tuple[tuple[SimRound, ...], ...]
    events: tuple[tuple[int, Event], ...]
    uncounted_s: float
    uncounted_events: tuple[Event, ...]
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """Contents of a checkpoint file; ``document`` and ``vectors`` are the strategy's dump."""

    standing: Standing
    document: Mapping[str, Any]
    vectors: Mapping[str, Float32Vector]
    uploads: Mapping[UploadKey, Contribution]

    def fetch(self, key: UploadKey) -> Contribution:
        """Return an update that the strategy refers to.

        Raises:
            IntegrityError: the checkpoint does not contain it.
        """
        if key not in self.uploads:
            raise IntegrityError(f"the checkpoint lacks the update of {key[2]} in round {key[0]}")
        return self.uploads[key]


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


def save(
    path: Path, name: str, data: str, standing: Standing, dump: Dump, uploads: Mapping[UploadKey, Contribution]
) -> None:
    """Write a checkpoint atomically.

    Args:
        path: the file; an existing one is replaced.
        name: the run's `fingerprint`.
        data: the devices' `data_digest`.
        standing: the simulator's state.
        dump: the strategy's state.
        uploads: the uploads that ``dump`` refers to; others are ignored.
    """
    kept = [uploads[key] for key in sorted(dump.uploads)]
    arrays: dict[str, NDArray[Any]] = {f"vector/{k}": v for k, v in dump.vectors.items()}
    arrays |= {f"upload/{i}": c.vector for i, c in enumerate(kept) if c.vector is not None}
    document = {
        "version": VERSION,
        "run": name,
        "data": data,
        "standing": asdict(standing),
        "strategy": dump.document,
        "uploads": [_contribution_document(c) for c in kept],
    }
    # The document is JSON in an array of bytes: the file then needs no pickle, and loads with allow_pickle=False.
    arrays["document"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the second argument for a flag
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def load(path: Path, name: str, data: str) -> Kept | None:
    """Return the checkpoint at ``path``, or None if there is none.

    Args:
        path: see `save`.
        name: the `fingerprint` of the run to resume.
        data: its `data_digest`; old files without one are accepted for any data.

    Raises:
        IntegrityError: the file is damaged, or belongs to another run.
    """
    if not path.exists():
        return None
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        document = json.loads(arrays.pop("document").tobytes())
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise IntegrityError(f"{path} is no checkpoint, or is damaged", hint="remove it to start again") from error
    if (document["version"], document["run"], document.get("data", data)) != (VERSION, name, data):
        raise IntegrityError(
            f"{path} is of another run", hint="give the options of the run that it is from, or another file"
        )
    vectors = {k.removeprefix("vector/"): v for k, v in arrays.items() if k.startswith("vector/")}
    uploads = [_contribution(c, arrays.get(f"upload/{i}")) for i, c in enumerate(document["uploads"])]
    standing = document["standing"]
    return Kept(
        Standing(
            standing["round"],
            standing["spent"],
            standing["clusters"],
            tuple(_round(r) for r in standing["history"]),
            tuple(tuple(_round(r) for r in start) for start in standing["starts"]),
            tuple((number, _event(e)) for number, e in standing["events"]),
            standing["uncounted_s"],
            tuple(_event(e) for e in standing["uncounted_events"]),
            standing["levels"],
        ),
        document["strategy"],
        vectors,
        {c.key: c for c in uploads},
    )


def _contribution_document(contribution: Contribution) -> dict[str, Any]:
    values = {
        f.name: getattr(contribution, f.name) for f in fields(contribution) if f.name not in ("vector", "attached")
    }
    return {**values, "phase": int(contribution.phase), "key_id": contribution.key_id.hex()}


def _contribution(values: Mapping[str, Any], vector: Float32Vector | None) -> Contribution:
    return Contribution(
        **{
            **values,
            "phase": Phase(values["phase"]),
            "key_id": bytes.fromhex(values["key_id"]),
            "margins": tuple(values["margins"]),
            "vector": vector,
        }
    )


def _round(values: Mapping[str, Any]) -> SimRound:
    norms = values["norms"]
    return SimRound(
        **{
            **values,
            "norms": None if norms is None else (norms[0], norms[1]),
            "sizes": tuple(values["sizes"]),
            "events": tuple(_event(e) for e in values["events"]),
        }
    )


def _event(values: Mapping[str, Any]) -> Event:
    return Event(values["round"], values["kind"], values["detail"])
