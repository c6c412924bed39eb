"""The program `shoal-aggregator`: the server that clusters devices and averages their masked updates.

Imports of heavy modules stand inside the commands, so that ``--help`` and ``--version`` start quickly.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aggregator.config import AggregatorConfig
from shoal.errors import IntegrityError, NotReadyError, ShoalError
from shoal.util.config import Layers
from shoal.util.console import add_version, mask_words, note, run_program, say, say_json, say_result, setup_logging
from shoal.util.files import named
from shoal.util.options import AsJson, GrantFile, Healthy, OwnerPrint, new_app, options_of
from shoal.util.process import trace_crashes
from shoal.util.progress import working

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from aggregator.status.facts import RunStatus
    from aggregator.status.record import FleetStatus, StoredRun
    from shoal.protocol.documents import RunPlan

app = new_app("Group devices and average their masked updates, without being able to read them.")

Directory = Annotated[Path, typer.Argument(help="Keys, membership, runs and results of this aggregator.")]


@app.command()
def init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="Name in the roster.")] = "aggregator",
    json: AsJson = False,
) -> None:
    """Make this aggregator's keys and print the path of the card to carry to the owner."""
    from aggregator import membership
    from shoal.membership.cards import say_card

    say_card("aggregator", name, membership.init(directory, name), as_json=json)


@app.command()
def join(
    directory: Directory,
    grant: GrantFile,
    owner: OwnerPrint,
    json: AsJson = False,
) -> None:
    """Accept the owner's grant."""
    from aggregator import membership

    data = grant.read_bytes()
    with named(grant, "shoal-fleet add-aggregator prints the path of the grant"):
        member = membership.join(directory, data, owner)
    say_result(
        {"fleet": member.fleet, "aggregator": member.identity.name}, f"joined fleet {member.fleet}", as_json=json
    )
    note(f"next: shoal-aggregator serve {directory}; the owner then starts runs: shoal-fleet run start")


@app.command()
@options_of(AggregatorConfig)
def serve(
    layers: Layers[AggregatorConfig],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, as `status --json` does.")
    ] = False,
) -> None:
    """Serve the runs in DIRECTORY/runs, one after another, and log the devices that a round is waiting for.

    `shoal-aggregator config` lists all settings. Those that are no option here are set in the file or the environment.
    """
    from aggregator.daemon import serve as serve_fleet

    values = layers.config()
    setup_logging(values.log)
    trace_crashes()
    if values.shards is not None and "RANK" in os.environ:
        from aggregator.shards.daemon import directory_of_rank
        from aggregator.shards.daemon import serve as serve_worker

        own = directory_of_rank(values.shards)
        if own is not None:
            serve_worker(values, own)
            return
    serve_fleet(values)
    if json:
        say_json(_document(values.dir)[0])


@app.command()
def backup(
    directory: Directory,
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.", dir_okay=False)],
    json: AsJson = False,
) -> None:
    """Write keys, membership, roster and the owner's orders to one private file, also while the program runs.

    The file is as secret as the directory. It has no run: after a restore the run in progress has ended.
    """
    from aggregator.storage.backup import save
    from shoal.membership.backup import tell

    tell(file, save(directory, file), as_json=json)
    note("it holds the private keys: store it on another machine, where only you can read it")


@app.command()
def restore(
    directory: Annotated[Path, typer.Argument(help="New directory for the files; missing or empty.")],
    file: Annotated[Path, typer.Argument(help="A file that `backup` wrote.", exists=True, dir_okay=False)],
    json: AsJson = False,
) -> None:
    """Write a backup's files to a new directory, from which the aggregator goes on with the owner's newest roster."""
    from aggregator.storage.backup import restore as restored

    made = restored(file, directory)
    say_result(
        {"directory": str(directory), "fleet": made.fleet, "roster": made.roster},
        f"{directory}: fleet {made.fleet}, roster {made.roster}",
        as_json=json,
    )
    note(f"next: shoal-aggregator serve {directory}, and end any other copy of this directory")
    note("then start a run: the one in progress has ended, and its devices keep their newest models")


shard = typer.Typer(
    help="A worker of a sharded aggregator, which holds one part of every update.", no_args_is_help=True
)
app.add_typer(shard, name="shard")


@shard.command("init")
def shard_init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="Name of the worker, which no other party of the fleet has.")],
    json: AsJson = False,
) -> None:
    """Make a worker's keys and print the path of the card to carry to the owner."""
    from aggregator.shards import membership
    from shoal.membership.cards import say_card

    say_card("worker", name, membership.init(directory, name), as_json=json)


@shard.command("join")
def shard_join(
    directory: Directory,
    grant: GrantFile,
    owner: OwnerPrint,
    json: AsJson = False,
) -> None:
    """Accept the owner's grant."""
    from aggregator.shards import membership

    data = grant.read_bytes()
    with named(grant, "shoal-fleet add-worker prints the path of the grant"):
        member = membership.join(directory, data, owner)
    say_result({"fleet": member.fleet, "worker": member.identity.name}, f"joined fleet {member.fleet}", as_json=json)
    note(f"next: shoal-aggregator shard serve {directory} --interface NAME; the owner then signs runs for all workers")


@shard.command("serve")
@options_of(AggregatorConfig, "dir", "interface", file=False)
def shard_serve(layers: Layers[AggregatorConfig]) -> None:
    """Serve one worker, as a service manager starts it; torchrun starts all of them with `serve --shards`."""
    from aggregator.shards.daemon import serve as serve_worker

    values = layers.config()
    setup_logging(values.log)
    trace_crashes()
    serve_worker(values, values.dir)


@app.command()
def status(directory: Directory, check: Healthy = False, json: AsJson = False) -> None:
    """Print whether the aggregator is running and connected, its devices, its runs, and what to do about each problem."""
    from aggregator.status import text
    from aggregator.status.record import REVOKED

    document, fleet = _document(directory)
    if check:
        _require_health(directory, fleet)
    if json:
        say_json(document)
        return
    runs, refused = document["runs"], document["refused"]
    members = [d for d in fleet.devices if d.reason != REVOKED]
    say(f"fleet {fleet.fleet}, devices: {len(members)}, runs: {len(runs)}, {text.state_words(fleet)}")
    for line in (
        *text.problem_lines(fleet),
        *text.worker_lines(fleet),
        *text.device_lines(fleet),
        *text.version_lines(fleet),
    ):
        say(line)
    now = {} if fleet.run is None else {fleet.run.run: text.round_line(fleet.run)}
    for name, reason in refused.items():
        say(f"{name} is no run of this fleet: {reason}")
    for r in runs:
        for line in _run_lines(r, now.get(r["run"], "")):
            say(line)


def _require_health(directory: Path, fleet: FleetStatus) -> None:
    """Check that the aggregator in ``directory`` serves its fleet.

    Raises:
        NotReadyError: the program does not run, is not connected, or its loop has shown no sign of life for SILENT_S.
    """
    import time

    from aggregator.status.live_file import read_live
    from aggregator.status.record import SILENT_S
    from shoal.util.times import second

    if not fleet.running:
        raise NotReadyError("the aggregator's program does not run", hint="shoal-aggregator serve DIRECTORY")
    if not fleet.connected:
        raise NotReadyError(f"not connected to {fleet.broker}", hint="shoal-aggregator doctor DIRECTORY")
    live = read_live(directory)
    if live is not None and time.time() - live.alive_at_s > SILENT_S:
        raise NotReadyError(
            f"no sign of life since {second(live.alive_at_s)}",
            hint="a long computation, a stopped process or a full disk: read its log",
        )


def _document(directory: Path) -> tuple[dict[str, Any], FleetStatus]:
    """Return the data of ``status --json``, and the record in it."""
    from aggregator.membership import AggregatorMembership
    from aggregator.status.gathering import fleet_status
    from aggregator.status.live_file import read_live
    from aggregator.storage.signed_runs import RunFiles
    from shoal.util.locks import in_use

    member = AggregatorMembership(directory)
    refused: dict[str, str] = {}
    live = read_live(directory) if in_use(directory) else None
    served = None if live is None or live.ended_at_s is not None else live.run
    read = [_standing(member, run.plan, served) for run in RunFiles(member, refused.__setitem__).all()]
    runs = [figures for figures, _ in read]
    fleet = fleet_status(member, [stored for _, stored in read if stored is not None])
    return {**fleet.document(), "serving": fleet.running, "runs": runs, "refused": refused}, fleet


def _run_lines(r: dict[str, Any], now: str) -> list[str]:
    """Return a run's lines; ``now`` is the line about its open round, empty if it has none."""
    from aggregator.rounds.standstill import NAMES_SHOWN
    from aggregator.run_log import CAPPED_HINT, OUT_OF_STEP_HINT, REFUSED_NORM_HINT, STANDS_APART_HINT, limited_by

    head = f"run {r['run']}: {r['algorithm']}, mask {mask_words(r['mode'])}"
    if r["damage"]:
        return [f"{head}, {r['damage']}"]
    state = "finished" if r["finished"] else f"{r['closed']} of {r['rounds']} rounds closed"
    state += f", {r['order']}" if r["order"] else ""
    accuracy = f", accuracy {100 * r['accuracy']:.1f}%" if r["accuracy"] is not None else ""
    lines = [f"{head}, {state}{_clusters(r)}{accuracy}{_obstacle(r)}"]
    limited = limited_by(r["capped"], r["refused_norm"], r["out_of_step"], r["stands_apart"])
    if limited:
        hints = {
            REFUSED_NORM_HINT: r["refused_norm"],
            CAPPED_HINT: r["capped"],
            OUT_OF_STEP_HINT: r["out_of_step"],
            STANDS_APART_HINT: r["stands_apart"],
        }
        lines.append(f"run {r['run']} limits: {limited}")
        lines += [f"  hint: {hint}" for hint, devices in hints.items() if devices]
    if refused := r["split_refused"]:
        lines.append(
            f"run {r['run']} split of cluster {refused['cluster']} refused in round {refused['round']}: {refused['reason']}"
        )
    for still in r["still"][:NAMES_SHOWN]:
        rounds = f"for {still['rounds']} rounds"
        lines.append(f"run {r['run']} stands still: cluster {still['cluster']} {rounds}: {still['reason']}")
        lines.append(f"  hint: {still['hint']}")
    if len(r["still"]) > NAMES_SHOWN:
        lines.append(f"run {r['run']} stands still: {len(r['still']) - NAMES_SHOWN} more clusters")
    return [*lines, now] if now else lines


def _clusters(r: dict[str, Any]) -> str:
    sizes = f", clusters: {'+'.join(map(str, r['cluster_sizes']))} devices" if r["cluster_sizes"] else ""
    found = r["groups"]
    return f"{sizes}, groups found: {found['k']} (silhouette {found['silhouette']:.2f})" if found else sizes


def _obstacle(r: dict[str, Any]) -> str:
    from aggregator.run_log import declined_by

    if r["older"]:
        return f"; {r['older']}"
    told = [f"too small to be averaged: {r['too_small']}"] if r["too_small"] else []
    return "".join(f"; {reason}" for reason in (declined_by(r["declined"]), *told) if reason)


def _standing(
    member: AggregatorMembership, plan: RunPlan, served: RunStatus | None
) -> tuple[dict[str, Any], StoredRun | None]:
    """Return the status of a run by its last closed round and by the one that is served, and the same for the fleet's record.

    If the run's directory can't be read, "damage" says why, and the second is None; the second is also None for a run that can
    no longer be served.
    """
    from aggregator.rounds.orders import WORDS
    from aggregator.status.gathering import stored_run
    from aggregator.storage.corruption import readable
    from aggregator.storage.owner_orders import read_orders
    from aggregator.storage.run_status import read_records
    from aggregator.storage.signed_runs import directory_of, is_void

    order = read_orders(member.directory).of(plan.run_id)
    run: dict[str, Any] = {"run": plan.run, "algorithm": plan.algorithm, "mode": plan.mode, "rounds": plan.rounds}
    run["order"] = WORDS[order]
    run["older"] = _older(member, plan)
    directory = directory_of(member, plan.run)
    known = None if served is None or served.run != plan.run else served
    run["waiting"], run["shortage"] = ("", None) if known is None else (known.line, known.lacks)
    try:
        records = read_records(directory)
        with readable(directory):
            void = is_void(member, plan, order)
            stored = None if run["older"] else stored_run(plan, records, order, void=void)
            return {**run, **_figures(records, plan), "damage": ""}, stored
    except IntegrityError as error:
        return {**run, **_figures([], plan), "damage": f"{error} ({error.hint})"}, None


def _older(member: AggregatorMembership, plan: RunPlan) -> str:
    """Return why an unfinished run can no longer be served; empty if it can be, or is finished."""
    from aggregator.storage.signed_runs import check_assignment, is_finished

    try:
        if not is_finished(member, plan):
            check_assignment(member, plan)
    except ShoalError as error:
        return str(error)
    return ""


def _figures(records: list[dict[str, Any]], plan: RunPlan) -> dict[str, Any]:
    from aggregator.run_log import cluster_sizes, too_small

    last = records[-1] if records else None
    grouped: dict[str, int] = next((r["clusters"] for r in reversed(records) if r["clusters"]), {})
    sizes = cluster_sizes(grouped)
    return {
        "closed": last["round"] if last else 0,
        "finished": bool(last and last["final"]),
        "loss": last["loss"] if last else None,
        "accuracy": last["correct"] / last["tested"] if last and last["tested"] else None,
        "clusters": len(sizes) if last else None,
        "cluster_sizes": sizes,
        "groups": _groups(records),
        "split_refused": _split_refused(records),
        "too_small": len(too_small(grouped, plan.min_contributors)),
        "still": list(last.get("still", ())) if last else [],
        "missing": last["missing"] if last else [],
        "declined": last.get("declined", {}) if last else {},
        "capped": _rounds_of(records, "capped"),
        "refused_norm": _rounds_of(records, "refused_norm"),
        "out_of_step": _rounds_of(records, "out_of_step"),
        "stands_apart": _standing_apart(records),
    }


def _groups(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the number of groups that a strategy has found, and their silhouette; None if it has not looked for any.

    Groups that were refused are one group.
    """
    decided = {"groups-found": None, "groups-refused": 1, "one-group": 1}
    for record in reversed(records):
        for event in record["events"]:
            if event["kind"] in decided:
                return {"k": decided[event["kind"]] or event["k"], "silhouette": event["silhouette"]}
    return None


def _split_refused(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return round, cluster and reason of the last trial of a split, if it was refused."""
    tried = (e for r in reversed(records) for e in reversed(r["events"]) if e["kind"] in ("split", "split-refused"))
    last = next(tried, None)
    if last is None or last["kind"] == "split":
        return None
    return {name: last[name] for name in ("round", "cluster", "reason")}


def _standing_apart(records: list[dict[str, Any]]) -> dict[str, int]:
    """Return device -> number of rounds that named it since it stands apart."""
    from aggregator.strategies.base import STANDS_APART

    named = ({e["device"] for e in r["events"] if e["kind"] == STANDS_APART} for r in records)
    return dict(sorted(Counter(device for devices in named for device in devices).items()))


def _rounds_of(records: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Return device -> number of rounds whose record has the device under ``name``."""
    return dict(sorted(Counter(device for r in records for device in r.get(name, {})).items()))


@app.command()
@options_of(AggregatorConfig, "dir")
def doctor(layers: Layers[AggregatorConfig], json: AsJson = False) -> None:
    """Check directory, disk, clock, broker, TLS, service, devices, runs, backup and versions; exit status 10 on a failure."""
    from aggregator.doctor import diagnose
    from shoal.util.checks import report

    with working("checking files and broker"):
        found = diagnose(layers.config())
    report(found, as_json=json)


@app.command("config")
@options_of(AggregatorConfig, "dir")
def show_config(layers: Layers[AggregatorConfig], json: AsJson = False) -> None:
    """Print every value that serve would use, with its source."""
    layers.show(as_json=json)


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal-aggregator")
    run_program(app, prog="shoal-aggregator")
