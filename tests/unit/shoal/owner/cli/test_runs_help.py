from typing import Annotated

import pytest
import typer

from shoal.owner.cli.runs import HelpAll, reveal, reveals

app = typer.Typer(rich_markup_mode=None)


@app.command()
def run(often: int = 1, seldom: Annotated[int, typer.Option(hidden=True)] = 2, _all: HelpAll = False) -> None: ...


@pytest.mark.parametrize(("option", "shown"), [("--help", False), ("--help-all", True)])
def test_seldom_options(option, shown, capsys):
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app)([option])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--often" in told
    assert ("--seldom" in told) is shown


def test_reveal():
    command = typer.main.get_command(app)
    assert not reveals(command)
    reveal(command)
    assert reveals(command)
