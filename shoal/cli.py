"""`shoal`: the researchers' program, with the demo, and with the commands of other installed packages, see `Commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from shoal.errors import ConfigError
from shoal.new import cli as new_cli
from shoal.report.delivery import SaveFile, deliver, stop_cleanly, writable
from shoal.util.console import add_version, forbid_inspection, note, run_program
from shoal.util.extensions import COMMANDS_GROUP, extension_names, load_extension
from shoal.util.files import write_atomic
from shoal.util.options import AsJson, new_app

LAB: Final = "shoal-lab"
LAB_COMMANDS: Final = ("bench", "data", "simulate")
"""Commands of the package `LAB`, which has the papers' experiments, the benchmarks and the attacks."""


class Commands(typer.core.TyperGroup):
    """The commands of this package and those of others, which are loaded when they are used.

    A package names a typer application in the entry points ``shoal.commands``.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands that are installed."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in extension_names(COMMANDS_GROUP) if name not in own)]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command; None for an unknown name.

        Raises:
            ConfigError: it is part of `LAB`, which is not installed, or its package can't be loaded.
        """
        found = super().get_command(ctx, name)
        if found is not None:
            return found
        app = load_extension(COMMANDS_GROUP, name)
        if app is None:
            if name in LAB_COMMANDS:
                raise ConfigError(
                    f"`shoal {name}` is in the package {LAB}, which is not installed",
                    hint=f"pip install ./lab, in a checkout of Shoal, installs {LAB}",
                )
            return None
        command = typer.main.get_command(app)
        command.name = name
        return command


app = new_app("Clustered federated learning with an aggregator that works blind: try it, and measure it.", cls=Commands)
app.command("new")(new_cli.new)


@app.command()
def demo(
    devices: Annotated[int, typer.Option(help="Device processes.", min=8, max=60)] = 20,
    skew: Annotated[str, typer.Option(help="labels (CFL's) or rotation (IFCA's).")] = "labels",
    data: Annotated[str, typer.Option(help="digits (installed with scikit-learn) or mnist.")] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of MNIST's files.", file_okay=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of data split, groups, origins and batch order.", min=0)] = 0,
    mode: Annotated[
        str,
        typer.Option(help="rotation (secret permutation, signs, Hadamard), permutation, signed-permutation or none."),
    ] = "rotation",
    save: SaveFile = None,
    html: Annotated[
        Path | None,
        typer.Option("--report", help="Also write the runs' pictures to this file.", dir_okay=False, callback=writable),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the runs' pictures in a browser.")] = False,
    json: AsJson = False,
) -> None:
    """Find hidden groups with real processes: a broker, an aggregator and 20 devices run FedAvg, CFL and IFCA."""
    from shoal.demo.report import ConsoleProgress, report, round_words
    from shoal.demo.runner import run_demo

    forbid_inspection()  # this process holds the owner's key and the secrets of the staged fleet
    stop_cleanly()
    with ConsoleProgress(round_words) as progress:
        result = run_demo(
            devices=devices,
            skew=skew,
            data=data,
            data_dir=data_dir,
            seed=seed,
            progress=progress,
            mode=mode,
        )
    deliver(result.data(), json, lambda: report(result), save, lambda: _show_page(result.page(), html, browse=open_))


def _show_page(page: bytes, path: Path | None, *, browse: bool) -> None:
    """Write a page to ``path``, or to a file of its own if it is only to be shown, and show it."""
    import tempfile
    import webbrowser

    from shoal.page.page import READABLE

    if path is None and not browse:
        return
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="shoal-demo-")) / "demo.html"
    write_atomic(path, page, mode=READABLE, durable=False)
    if browse and not webbrowser.open(path.absolute().as_uri()):
        note("no browser can be opened here")
    note(f"the runs' pictures: {path}")


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal")
    run_program(app, prog="shoal")
