"""Standing orders at the aggregator: `shoal-fleet schedule OWNER --task T ...`, and `schedule list|pause|resume|stop OWNER`.

`schedule OWNER` is `run start OWNER`, whose options --every, --at-most, --until make a run a standing order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from shoal.errors import NotReadyError, ShoalError
from shoal.owner.cli import runs
from shoal.owner.cli.pairs import Directory
from shoal.owner.keys.unlock import open_fleet
from shoal.protocol.requests import RequestAction
from shoal.util.console import note, say_result
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


class _Group(TyperGroup):
    """The subcommands; anything else is the owner's directory, with the options of `run start`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the subcommand of a name, or `run start`."""
        return super().get_command(ctx, cmd_name) or get_command(runs.app).commands["start"]  # type: ignore[attr-defined]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and its arguments."""
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "start", self.get_command(ctx, args[0]), args


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    help="Let the aggregator start runs by itself: `schedule OWNER --every 1d --at-most 30` with the options of `run start`, "
    "which `schedule OWNER --help` lists.",
)


def signed_again(fleet: FleetDirectory) -> bytes | None:
    """Sign the standing order in force under the fleet's newest keys, and return its run package; None without one."""
    from shoal.owner.keys.vault import run_file
    from shoal.owner.runs.standing import sign_again
    from shoal.util.files import read_private

    with fleet.changing():
        plan = sign_again(fleet)
    return None if plan is None else read_private(run_file(fleet.path, plan.run))


def send_again(fleet: FleetDirectory) -> None:
    """Sign the standing order in force again, and send it to the aggregator, or print which command does."""
    package = signed_again(fleet)
    if package is None:
        return
    try:
        runs.answer(fleet, RequestAction.START, package=package)
        note("the aggregator has the standing order, signed under the newest keys")
    except ShoalError as error:
        note(f"warning: the standing order is signed under the newest keys, and the aggregator has not got it: {error}")
        note(f"until then no run of it begins: shoal-fleet publish {fleet.path} sends it")


def _say(directory: Directory, action: RequestAction, *, json: bool) -> None:
    """Send a request about the standing order, and print the order as the aggregator has it."""
    from shoal.owner.console.asking import schedule_data, schedule_line

    entry = runs.answer(open_fleet(directory), action, schedule=True).schedule
    if entry is None:
        raise NotReadyError("the aggregator has no standing order", hint="shoal-fleet schedule signs one")
    say_result(schedule_data(entry), schedule_line(entry), as_json=json)


@app.command("list")
def list_(directory: Directory, json: AsJson = False) -> None:
    """Show the standing order at the aggregator: its runs, its end, and what the next run waits for."""
    _say(directory, RequestAction.LIST, json=json)


@app.command()
def pause(directory: Directory, json: AsJson = False) -> None:
    """Let no further run begin until the order is resumed; a run that is under way goes on."""
    _say(directory, RequestAction.PAUSE, json=json)


@app.command()
def resume(directory: Directory, json: AsJson = False) -> None:
    """Let a paused order go on."""
    _say(directory, RequestAction.RESUME, json=json)


@app.command()
def stop(directory: Directory, json: AsJson = False) -> None:
    """End the order for good; a run that is under way goes on, until `run stop` ends it."""
    from shoal.owner.runs.standing import note_stopped, order_in_force

    _say(directory, RequestAction.STOP, json=json)
    fleet = open_fleet(directory)
    plan = order_in_force(fleet)
    if plan is not None:
        note_stopped(fleet, plan)
