"""A command's options from a configuration: those that it names, above the file and the environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from shoal.util.config import Layers, Setting
from shoal.util.options import new_app, options_of


@dataclass(frozen=True, slots=True)
class Pond:
    TABLE: ClassVar = "pond"

    dir: Annotated[Path, Setting("Where it is.", metavar="DIRECTORY", argument=True)]
    max_depth: Annotated[float, Setting("Metres.")] = 2.0
    frozen: Annotated[bool, Setting("In winter.", off="open")] = False
    fish: Annotated[int | None, Setting("How many.", shown="unknown")] = None
    tide: Annotated[str, Setting("Of the sea.", rare=True)] = ""


@pytest.fixture
def pond():
    """Return a function that calls a command with the options of these settings, and returns its settings and output."""

    def call(*words, names=(), file=True, **environment):
        app, taken = new_app("A pond."), []

        @app.command()
        @options_of(Pond, *names, file=file)
        def show(layers: Layers[Pond], depth: Annotated[str, typer.Argument()] = "", loud: bool = False) -> None:
            taken.extend([layers, depth, loud])

        done = CliRunner().invoke(app, [str(word) for word in words], env=environment)
        return taken, done.output

    return call


def test_options_arguments_and_own(pond):
    (layers, depth, loud), _ = pond("p", "deep", "--max-depth", 3, "--open", "--loud", SHOAL_POND_FISH="7")
    assert layers.config() == Pond(Path("p"), max_depth=3.0, frozen=False, fish=7)
    assert (depth, loud) == ("deep", True)
    assert layers.origins == {
        "dir": "flag", "max_depth": "flag", "frozen": "flag", "fish": "SHOAL_POND_FISH", "tide": "default"
    }  # fmt: skip


def test_the_help_has_defaults(pond):
    _, told = pond("--help")
    lines = ("--max-depth <float>", "(2.0)", "--frozen / --open", "(open)", "(unknown)", "--config")
    assert [line for line in lines if line not in told] == []
    assert "--tide" not in told


def test_a_command_with_some_settings(pond, tmp_path):
    _, told = pond("--help", names=("fish",), file=False)
    assert "--fish" in told
    assert not [other for other in ("--max-depth", "--config", "DIRECTORY") if other in told]
    (tmp_path / "pond.toml").write_text("[pond]\nmax_depth = 9\n")
    (layers, *_), _ = pond("--config", tmp_path / "pond.toml", names=("fish",))
    assert layers.config(dir=Path("d")).max_depth == 9.0


def test_a_command_called_as_a_function():
    found = []

    @options_of(Pond)
    def show(layers: Layers[Pond], loud: bool = False) -> None:
        found.append((layers.config(), loud))

    show(True, dir=Path("d"))
    assert found == [(Pond(Path("d")), True)]
