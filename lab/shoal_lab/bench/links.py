"""Runs of one task in each precision: bytes, accuracy over rounds, and the groups that are found.

A run is simulated with a fleet's defaults, and with a fleet's code for every vector: it is masked, encoded, decoded, and the
rounding error is fed back. Bytes are those of whole messages, sealed and cut into chunks; announcements are left out, since
they are alike in every precision.

Example: ``shoal bench links --task digits`` compares the precisions on the demo's task.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from crypto.seal.envelope import GroupKey, seal_message_to_member, seal_to_group
from crypto.seal.identity import Identity
from shoal import limits
from shoal.demo.data import hide_groups, load_images
from shoal.demo.runner import HIDDEN_UNITS, LOCAL
from shoal.membership.statements import sign_statement
from shoal.protocol import channels
from shoal.protocol.chunking import HEADER_BYTES
from shoal.protocol.codec import encode
from shoal.protocol.messages import Phase, Upload
from shoal.protocol.states import HeldState, MeanHeader, Statement
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.metrics import adjusted_rand
from shoal.simulation.engine.simulate import Observation, SimResult, simulate
from shoal.simulation.trainers.networks import OneHidden
from shoal_lab.experiments.wild import scenarios
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.runs import fleet_of

if TYPE_CHECKING:
    from shoal.types import Float32Vector

DIGITS: Final = "digits"
"""The demo's task; all others are scenarios of the experiment ``wild``."""
TASKS: Final = (DIGITS, "permuted-4", "rotated-4", "unequal-14-4-2")
ALGORITHM: Final = "cfl"
SEED: Final = 0
DEVICES: Final = 20
ROUNDS: Final = 60
EVALUATIONS: Final = 6
"""Rounds of a run in which accuracy is measured, evenly spread."""
TEST_IMAGES: Final = 200
SHARES: Final = (0.6, 0.8)
"""Ends of the training and the validation share of a device's digits."""


def measure(tasks: Iterable[str], rounds: int = ROUNDS, *, progress: Callable[[str], None]) -> dict[str, Any]:
    """Return a row for each task and precision, and tell of each run as it ends.

    A row has the task, algorithm, seed, precision and the coordinates of a vector, and

    - ``bytes_up``, ``bytes_down``: of the updates that devices sent and the means that they fetched, in the whole run, as sealed
      and cut into chunks; ``vector_up``, ``vector_down``: of the vectors in them alone;
    - ``accuracy``: share of right labels over all test shares at the end, in percent; ``accuracies``: (round, percent) before it;
    - ``ari``: adjusted Rand index of the clusters at the end against the hidden groups; None if there are none;
    - ``cosine_error``: largest error of a cosine between two updates that one round's rounding makes, over the measured rounds.

    Args:
        tasks: `DIGITS` and names of wild scenarios.
        rounds: of each run.
        progress: is told of each run.

    Raises:
        UsageError: a name is unknown.
        MissingDataError: the files of a data set are not here.
    """
    rows = []
    for task in tasks:
        fleet = _digits() if task == DIGITS else fleet_of(task, SEED, None, None, TEST_IMAGES)
        for precision in limits.PRECISIONS:
            rows.append(_run(fleet, task, precision, rounds))
            progress(f"{task}: {precision}: {rows[-1]['accuracy']:.1f} %")
    return {"rounds": rounds, "rows": rows}


def _digits() -> Fleet:
    x, y, side = load_images(DIGITS, None)
    hidden = hide_groups(x, y, side, devices=DEVICES, skew="labels", seed=SEED)
    ends = [[int(share * len(labels)) for share in SHARES] for labels in hidden.y]
    parts = [
        [Shard(a, b) for a, b in zip(np.split(x, at), np.split(y, at), strict=True)]
        for x, y, at in zip(hidden.x, hidden.y, ends, strict=True)
    ]
    train, validation, test = zip(*parts, strict=True)
    population = Population(train, validation, test, groups=hidden.groups)
    return Fleet(population=population, network=OneHidden(side * side, HIDDEN_UNITS, 10), local=LOCAL)


def _run(fleet: Fleet, task: str, precision: str, rounds: int) -> dict[str, Any]:
    chosen = fleet_run(ALGORITHM, {}, precision_up=precision, precision_down=precision)
    errors = [0.0]
    every = max(1, rounds // EVALUATIONS)

    def watch(seen: Observation) -> None:
        links = seen.workforce.models.links
        if fleet.later is not None and seen.round == rounds // 2:
            seen.workforce.use_data(fleet.later)
        if links.exact:
            errors.append(
                _cosine_error(links.exact, {c.device: c.row for c in seen.contributions if c.vector is not None})
            )
        # The updates of the round that follows are measured.
        links.exact = {} if seen.round % every == 1 % every else None

    participation = 1.0 if task == DIGITS else scenarios.find(task).participation
    sim_options = fleet_options(
        chosen, rounds=rounds, local=fleet.local, seed=SEED, participation=participation, evaluate_every=every
    )
    done = simulate(ALGORITHM, chosen.values, fleet.population, fleet.network, sim_options, watch=watch)
    (up, uploads), (down, means) = done.workforce.models.links.up, done.workforce.models.links.down
    head_up, head_down = heads()
    accuracies = tuple((r.round, float(r.accuracy)) for r in done.history if r.accuracy is not None)
    return {
        "task": task,
        "algorithm": ALGORITHM,
        "seed": SEED,
        "length": done.run.length,
        "precision": precision,
        "bytes_up": up + uploads * head_up + _chunk_heads(up, uploads),
        "bytes_down": down + means * head_down + _chunk_heads(down, means),
        "vector_up": up,
        "vector_down": down,
        "accuracy": accuracies[-1][1],
        "accuracies": accuracies,
        "ari": _ari(done, fleet),
        "cosine_error": max(errors),
    }


def _ari(done: SimResult, fleet: Fleet) -> float | None:
    groups = fleet.last.groups
    if groups is None:
        return None
    places = [i for i, group in enumerate(groups) if group != scenarios.NO_GROUP]
    taken = done.taken()
    return float(adjusted_rand([groups[i] for i in places], [int(taken[i]) for i in places]))


def _cosine_error(exact: Mapping[str, Float32Vector], sent: Mapping[str, Float32Vector]) -> float:
    """Return the largest change of a cosine between two devices' updates."""
    names = sorted(exact.keys() & sent.keys())
    before, after = (_cosines(np.stack([rows[n] for n in names])) for rows in (exact, sent))
    return float(np.abs(before - after).max())


def _cosines(rows: Any) -> Any:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths, lengths, 1.0)
    return unit @ unit.T


def _chunk_heads(vectors: int, count: int) -> int:
    """Return the bytes of the chunks' headers of ``count`` messages with ``vectors`` bytes in all."""
    each = 0 if not count else -(-(vectors // count + sum(heads()) // 2) // limits.CHUNK_BYTES)
    return count * each * HEADER_BYTES


@lru_cache(maxsize=1)
def heads() -> tuple[int, int]:
    """Return the bytes of a sealed upload and of a sealed mean besides the vector, from messages sealed here."""
    device, server = Identity.generate("device-00"), Identity.generate("aggregator")
    fleet, run_id = "demo", bytes(16)
    held = tuple(HeldState(0, round_, bytes(32)) for round_ in (8, 9))
    upload = Upload(
        fleet=fleet,
        run=1,
        run_id=run_id,
        round=9,
        phase=Phase.TRAIN,
        nonce=bytes(16),
        device=device.name,
        recipient=server.member.seal_key,
        task_digest=bytes(32),
        mode="rotation",
        key_id=bytes(16),
        model=0,
        samples=90,
        loss=0.5,
        margins=(),
        correct=0,
        tested=0,
        length=0,
        statement=sign_statement(device, Statement(fleet, run_id, 9, device.name, held, transcript=bytes(32))),
    )
    up = channels.UPLOAD.head(fleet, device.name, server.name)
    mean = MeanHeader(fleet=fleet, run_id=run_id, round=9, key_id=bytes(16), model=0, length=0, segment="")
    down = channels.MEAN.head(fleet, server.name, "*")
    group = GroupKey(fleet, "broadcast", bytes(32))
    sealed_up = seal_message_to_member(device, server.member.seal_key, up, encode(upload), b"").payload
    return len(sealed_up), len(seal_to_group(server, group, down, encode(mean)))


def words(data: Mapping[str, Any]) -> list[str]:
    """Return a table for each task: bytes against float32, accuracy over rounds, and groups."""
    found = []
    for task, rows in itertools.groupby(data["rows"], key=operator.itemgetter("task")):
        mine = list(rows)
        found += ["", f"{task}, {mine[0]['algorithm']}, d = {mine[0]['length']}, seed {mine[0]['seed']}"]
        found.append("precision  MB up  MB down  of float32  accuracy (rounds before)  ARI  worst cosine error")
        found += [_line(row, mine[0]["bytes_up"] + mine[0]["bytes_down"]) for row in mine]
    return found[1:]


def _line(row: Mapping[str, Any], whole: int) -> str:
    share = f"{100 * (row['bytes_up'] + row['bytes_down']) / whole:.1f} %"
    before = " ".join(f"{accuracy:.1f}" for _, accuracy in row["accuracies"][:-1])
    ari = "-" if row["ari"] is None else f"{row['ari']:.2f}"
    up, down = row["bytes_up"] / 1e6, row["bytes_down"] / 1e6
    return (
        f"{row['precision']:9}  {up:5.1f}  {down:7.1f}  {share:>10}  {row['accuracy']:.2f} % ({before})  {ari:>4}  "
        f"{row['cosine_error']:.4f}"
    )
