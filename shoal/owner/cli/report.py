"""`shoal-fleet report`: the fleet page of a run as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.util.console import say_result
from shoal.util.options import AsJson
from shoal.util.progress import working


def report(
    run: Annotated[
        Path, typer.Argument(help="The run's directory at the aggregator, such as server/run-000001, or a copy of it.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, .html.", dir_okay=False)],
    json: AsJson = False,
) -> None:
    """Write a run's pictures as one HTML file: clusters, accuracy and loss, cosines, participation, bytes and times.

    A running aggregator shows the same page live, with the fleet's state: shoal-aggregator serve --http; it can be saved there.
    """
    from shoal.owner.runs.report import run_report

    with working("reading the rounds"):
        run_report(run, out)
    say_result({"run": str(run), "file": str(out), "bytes": out.stat().st_size}, str(out), as_json=json)
