"""The pages of the documents, their blocks of commands, and a shell in which a page's commands run as written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

from tests.helpers.trees import ONE_THREAD, PROGRAMS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
BLOCK = re.compile(r"(?:^ *<!-- not run: (.+?) -->\n)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

TUTORIAL = "docs/tutorial.md"
GUIDE = tuple(
    f"docs/operator/{name}.md"
    for name in (
        "enrol",
        "README",
        "install",
        "data",
        "run",
        "watch",
        "models",
        "backup",
        "upgrade",
        "troubleshoot",
        "broker",
    )
)
"""The pages of the operator's guide in an order in which their commands work."""
RESEARCH = "docs/researcher/README.md"
RUN = (TUTORIAL, *GUIDE, RESEARCH)
"""All pages whose commands are run."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        kind: its language; empty if the page names none.
        lines: its lines, without the block's indentation.
        reason: why no test runs it; empty if one does.
    """

    kind: str
    lines: tuple[str, ...]
    reason: str


def text_of(name):
    return (ROOT / name).read_text()


def blocks(name, kind):
    """Return the blocks of one language in a page."""
    found = []
    for reason, indent, language, body in BLOCK.findall(text_of(name)):
        if language == kind:
            lines = tuple(line.removeprefix(indent) for line in body.splitlines())
            found.append(Block(language, lines, reason))
    return found


def lines_to_run(name):
    """Return the lines of all ``sh`` blocks of a page that are not marked as not run."""
    return [line for block in blocks(name, "sh") if not block.reason for line in block.lines]


def pattern(line):
    """Return the expression of a printed line: its figures and times may differ."""
    return re.compile("^" + re.sub(r"\d+", r"\\d+", re.escape(line)) + "$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Output and exit status of a script."""

    status: int
    out: str
    errors: str


def run_script(lines, home, limit_s, replace):
    """Run lines in one shell, as a person types them, and end all programs that they have started.

    Args:
        lines: of the page.
        home: the directory, which must exist.
        limit_s: seconds.
        replace: text of the page -> text for the test, such as ports.
    """
    programs = home.parent / f"{home.name}-programs"
    _lay_programs(programs)
    script = "\n".join(["set -e", *lines, ""])
    for old, new in replace.items():
        script = script.replace(old, new)
    out, errors = home.parent / f"{home.name}-out", home.parent / f"{home.name}-errors"
    # Files and no pipes: the programs that the lines start in the background have them open until they are ended.
    with out.open("w") as out_file, errors.open("w") as errors_file:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=home,
            env={
                **os.environ,
                **ONE_THREAD,
                "HOME": str(home),
                "PYTHONPATH": str(ROOT),
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=errors_file,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        finally:
            _end(process)
    return Outcome(status, out.read_text(), errors.read_text())


def _lay_programs(folder):
    """Put our programs, as an installation has them, and ``python`` into a folder for the path."""
    folder.mkdir()
    calls = {name: f' -c "from {module} import main; main()"' for name, module in PROGRAMS.items()}
    for name, words in {**calls, "python": "", "pytest": " -m pytest"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (folder / name).chmod(0o755)


def _end(process):
    """End the shell and all programs that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
