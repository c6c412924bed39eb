"""The program `shoal-aggregator`: the server that clusters devices and averages their masked updates.

Imports of heavy modules stand inside the commands, so that ``--help`` and ``--version`` start quickly.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from aggregator.config import AggregatorConfig
from shoal.util.config import Layers
from shoal.util.console import add_version, note, run_program, say_json, say_result, setup_logging, working
from shoal.util.files import named
from shoal.util.options import AsJson, GrantFile, Healthy, OwnerPrint, new_app, options_of
from shoal.util.process import trace_crashes

app = new_app("Group devices and average their masked updates, without being able to read them.")

Directory = Annotated[Path, typer.Argument(help="Keys, membership and runs of this server.")]


@app.command()
def init(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """Make this aggregator's keys and print the path of the card to carry to the owner."""
    from aggregator import membership
    from shoal.membership.cards import say_card

    say_card("aggregator", "aggregator", membership.init(directory, "aggregator"), as_json=json)


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
        from aggregator.status.stored import document

        say_json(document(values.dir)[0])


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
    from aggregator.status.stored import document, lines, require_health

    found, fleet = document(directory)
    if check:
        require_health(directory, fleet)
    say_result(found, *lines(found, fleet), as_json=json)


@app.command()
@options_of(AggregatorConfig, "dir")
def doctor(layers: Layers[AggregatorConfig], json: AsJson = False) -> None:
    """Check directory, disk, clock, broker, TLS, service, devices, runs, backup and versions; exit status 10 on a failure."""
    from aggregator.doctor import diagnose
    from shoal.util.console import report

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
