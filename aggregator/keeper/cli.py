"""The program ``shoal-keeper``; imports of heavy modules stand inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aggregator.config import AggregatorConfig
from shoal.util.config import Layers
from shoal.util.console import add_version, note, run_program, say_result, setup_logging
from shoal.util.files import named
from shoal.util.options import AsJson, GrantFile, OwnerPrint, new_app, options_of
from shoal.util.process import trace_crashes

app = new_app("Open sums of updates for the aggregator, and no single update.")

Directory = Annotated[Path, typer.Argument(help="Keys, membership and memory of this server.")]


@app.command()
def init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="Name, which no other party of the fleet has.")] = "keeper",
    json: AsJson = False,
) -> None:
    """Make this keeper's keys and print the path of the card to carry to the owner."""
    from aggregator.keeper import daemon
    from shoal.membership.cards import say_card

    say_card("keeper", name, daemon.init(directory, name), as_json=json)


@app.command()
def join(directory: Directory, grant: GrantFile, owner: OwnerPrint, json: AsJson = False) -> None:
    """Accept the owner's grant."""
    from aggregator.shards import membership

    data = grant.read_bytes()
    with named(grant, "shoal-fleet add-keeper prints the path of the grant"):
        member = membership.join(directory, data, owner)
    say_result({"fleet": member.fleet, "keeper": member.identity.name}, f"joined fleet {member.fleet}", as_json=json)
    note(f"next: shoal-keeper serve {directory}; the owner names it: run start --keeper {member.identity.name}")


@app.command()
@options_of(AggregatorConfig, "dir", file=False)
def serve(layers: Layers[AggregatorConfig]) -> None:
    """Answer the aggregator's requests until stopped."""
    from aggregator.keeper.daemon import serve as serve_keeper

    values = layers.config()
    setup_logging(values.log)
    trace_crashes()
    serve_keeper(values)


@app.command()
def status(directory: Directory, json: AsJson = False) -> None:
    """Print what this keeper has opened: the last requests of the aggregator, with the sizes of their cells."""
    from aggregator.keeper.memory import KeeperMemory
    from aggregator.shards.membership import WorkerMembership

    WorkerMembership(directory)  # of another program's directory or a missing one it says so
    opened = KeeperMemory.load(directory).opened
    rows = [{"run": one.run, "round": one.round, "cells": [len(cell) for cell in one.cells]} for one in opened]
    lines = [f"run {one.run} round {one.round}: cells of {', '.join(str(len(c)) for c in one.cells)}" for one in opened]
    say_result({"opened": rows}, *(lines or ["nothing opened yet"]), as_json=json)


@app.command()
@options_of(AggregatorConfig, "dir", file=False)
def doctor(layers: Layers[AggregatorConfig], json: AsJson = False) -> None:
    """Check directory, disk, clock, broker, TLS and memory; exit status 10 on a failure."""
    from aggregator.keeper.daemon import diagnose
    from shoal.util.console import report

    report(diagnose(layers.config()), as_json=json)


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal-keeper")
    run_program(app, prog="shoal-keeper")
