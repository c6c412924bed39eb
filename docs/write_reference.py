"""Write the pages of docs/reference from the programs: command lines, configuration, limits and metrics.

    python docs/write_reference.py --write     # without --write the pages that differ are named, with exit status 1

A test compares the pages with the programs, so a new option, setting or metric needs this command and no other work.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import tempfile
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]

from typer.main import get_command  # noqa: E402 - the path above leads to our modules

from shoal.owner.cli.runs import reveal  # noqa: E402
from shoal.util.config import Setting, settings_in, variable_of  # noqa: E402

FOLDER: Final = ROOT / "docs" / "reference"
SCRIPTS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PROGRAMS: Final = ("shoal-fleet", "shoal-aggregator", "shoal-edge", "shoal-keeper", "shoal")
KINDS: Final = {Path: "PATH", int: "N", float: "X", str: "TEXT"}
GENERATED: Final = "[`docs/write_reference.py`](../write_reference.py) writes this page from the programs."
VARIABLES: Final = {
    "SHOAL_DEBUG": "`1` shows the traceback of an error, as `--debug` before the command does",
    "SHOAL_PASSPHRASE_FILE": "a file of mode 0600 with the passphrase of the owner's directory or of a backup",
    "SHOAL_DATA_DIR": "a folder in which `shoal simulate` looks for data sets first",
    "NO_COLOR": "any value: no colours in the log",
}
"""Variables besides those of the settings."""


def cli_page() -> str:
    """Return the page of all commands with their arguments and options."""
    lines = [
        "# Commands",
        "",
        "This page lists every command of the five programs, with its options.",
        GENERATED,
        "",
        "All programs have `--version`, `--help` and `-h`, and for shells `--install-completion` and `--show-completion`.",
        "With `--json` a command prints one object on stdout: `schema`, `ok`, and `data` or `error`. `--debug` before a command",
        "shows the traceback of an error. [Troubleshooting](../operator/troubleshoot.md) has the exit statuses.",
    ]
    for program in PROGRAMS:
        command = get_command(importlib.import_module(SCRIPTS[program].removesuffix(":main")).app)
        lines += ["", f"## {program}", "", _prose(command.help)]
        for words, found in _commands(command, (program,)):
            lines += ["", f"### {' '.join(words)}", "", *_described(words, found)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command and group of commands that ``--help`` shows, with its words."""
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    if command.invoke_without_command or len(words) > 1:
        yield words, command
    context = command.make_context(command.name, [], resilient_parsing=True)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is not None and not found.hidden:
            yield from _commands(found, (*words, name))


def _described(words: tuple[str, ...], command: Any) -> Iterator[str]:
    if command.callback is None:  # a group: its commands follow
        yield _prose(command.help)
        return
    signature = inspect.signature(inspect.unwrap(command.callback), eval_str=True)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    reveal(command)
    shown = [p for p in command.params if p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    named = [_argument(p) for p in arguments]
    yield "```text"
    yield " ".join([*words, *named, *(["[OPTIONS]"] if options else [])])
    yield "```"
    yield ""
    yield _prose(command.help)
    if arguments or options:
        yield ""
        yield "| argument or option | meaning | default |"
        yield "|---|---|---|"
    for parameter in arguments:
        yield _row(_argument(parameter).strip("[]"), parameter)
    for parameter in options:
        yield _row(_option(parameter, hints.get(parameter.name)), parameter)
    epilog = _epilog(command)
    if epilog:
        yield from ("", "```text", epilog, "```")


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper().strip("[]")
    more = "..." if parameter.nargs == -1 else ""
    return f"{name}{more}" if parameter.required else f"[{name}{more}]"


def _option(parameter: Any, hint: Any) -> str:
    both = ", ".join(parameter.opts)
    if parameter.is_flag:
        return " / ".join([both, *parameter.secondary_opts])
    return f"{both} {parameter.metavar or _kind(hint)}"


def _kind(hint: Any) -> str:
    """Return the word for values of a type: PATH for a `Path`, N for a whole number."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, UnionType, list):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return KINDS.get(hint, "TEXT")


def _row(form: str, parameter: Any) -> str:
    said = parameter.show_default
    if isinstance(said, str):
        default = said
    elif parameter.required:
        default = "required"
    elif parameter.default in (None, "", (), []) or isinstance(parameter.default, bool) or callable(parameter.default):
        default = ""
    else:
        default = f"`{parameter.default}`"
    words, form = _prose(parameter.help or "").replace("\n", " "), form.replace("|", r"\|")
    return f"| `{form}` | {words} | {default} |".replace("|  |", "| |")


def _epilog(command: Any) -> str:
    """Return the text below a command's options, such as the list of algorithms."""

    class Formatter:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

    written = Formatter()
    if type(command).__dict__.get("format_epilog"):
        command.format_epilog(None, written)
    return written.text.strip("\n")


def _prose(text: str) -> str:
    """Return a text of a program as Markdown: no sign of it is markup but backquotes."""
    parts = re.split(r"(`[^`]*`)", inspect.cleandoc(text).strip())
    return "".join(p if p.startswith("`") else re.sub(r"([<>*|])", r"\\\1", p) for p in parts)


def configuration_page() -> str:
    """Return the page of settings, variables and limits."""
    lines = [
        "# Configuration",
        "",
        "This page lists every setting of devices, the aggregator and the owner, and the limits. A keeper has settings of the",
        "aggregator.",
        GENERATED,
        "",
        "`run`, `serve` and `doctor` read, in this order, flags, variables, systemd's",
        "[credentials](../../deploy/README.md#as-services) for secrets, a TOML file (`--config FILE`) and defaults. Settings",
        "that few machines need have no flag. The owner's program reads variables and `settings.toml` in the owner's directory.",
        "`shoal-edge config DIR` and `shoal-aggregator config DIR` print each value and its source.",
    ]
    settings = {
        "Device": ("edge", "edge_client.config.EdgeConfig"),
        "Aggregator": ("aggregator", "aggregator.config.AggregatorConfig"),
        "Owner": ("fleet", "shoal.owner.keys.settings.OwnerConfig"),
    }
    for title, (table, where) in settings.items():
        module, _, name = where.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        lines += ["", f"## {title}", "", f"The table `[{table}]` of the TOML file.", ""]
        lines += ["| setting | variable | meaning | default |", "|---|---|---|---|"]
        for setting in settings_in(kind).values():
            meaning = _prose(setting.help)
            row = f"| `{setting.name}` | `{variable_of(kind, setting.name)}` | {meaning} | {_default(setting)} |"
            lines.append(row.replace("|  |", "| |"))
    lines += ["", "## Other variables", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    lines += [
        "",
        "## Limits",
        "",
        "Constants in `shoal/limits.py`; the unit is in the name. They bound the memory and time that a peer can cost.",
        "",
        "| limit | value | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {value} | {meaning} |".replace("|  |", "| |") for name, value, meaning in _limits()]
    return "\n".join(lines) + "\n"


def _default(setting: Setting) -> str:
    if setting.default is dataclasses.MISSING:
        return "required"
    if setting.shown or setting.default in ("", None):
        return setting.shown
    value = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
    return f"`{value}`"


def _limits() -> Iterator[tuple[str, str, str]]:
    """Yield name, value and meaning of each limit: the assignments of shoal/limits.py that a docstring follows."""
    limits = importlib.import_module("shoal.limits")
    body = ast.parse((ROOT / "shoal" / "limits.py").read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        words = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            words = " ".join(str(after.value.value).split())
        yield node.target.id, _value(getattr(limits, node.target.id)), _prose(words)


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list, frozenset)):
        return ", ".join(map(_value, value))
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def metrics_page() -> str:
    """Return the page of metrics, from those of an aggregator whose fleet has devices, rounds and clusters."""
    lines = [
        "# Metrics",
        "",
        "`shoal-aggregator serve --http` has these metrics under `/metrics`, in Prometheus' text format.",
        GENERATED,
        "",
        "No label names a device. Metrics of a run are there while one is served, those of rounds once one has closed, and",
        "those of devices' condition once a device reports it (`shoal-edge run --vitals`). `deploy/grafana/shoal.json` is a",
        "dashboard of them; [Watching a fleet](../operator/watch.md#metrics) lists alerts.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in sorted(_families(), key=lambda f: str(f.name)):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels})
        shown = ", ".join(f"`{label}`" for label in labels)
        row = f"| `{family.name}{suffix}` | {family.type} | {shown} | {_prose(family.documentation)} |"
        lines.append(row.replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _families() -> list[Any]:
    """Return the metric families of an aggregator with handmade rounds, all of whose devices report their condition."""
    from prometheus_client.parser import text_string_to_metric_families

    from shoal.protocol.messages import Vitals
    from tests.helpers.pages import NOW_S, PagePlace, names

    vitals = Vitals(disk_free_bytes=1, memory_free_bytes=1, load=1.0, cores=1, temperature_c=1.0, battery_percent=1)
    with tempfile.TemporaryDirectory() as folder, PagePlace(Path(folder), names(4)) as place:
        place.close_rounds(8)
        place.publish(changes={device: {"vitals": vitals, "vitals_at_s": NOW_S} for device in place.devices})
        return list(text_string_to_metric_families(place.metrics.text().decode()))


PAGES: Final[dict[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
}


def outdated() -> list[str]:
    """Return the names of the pages that differ from the programs."""
    return [name for name, page in PAGES.items() if not _is_written(name, page())]


def _is_written(name: str, text: str) -> bool:
    path = FOLDER / name
    return path.exists() and path.read_text() == text


def main() -> None:
    """Write the pages, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    if parser.parse_args().write:
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page())
        return
    different = outdated()
    if different:
        sys.exit(f"run: python docs/write_reference.py --write; these pages differ: {', '.join(different)}")


if __name__ == "__main__":
    main()
