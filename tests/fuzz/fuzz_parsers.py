"""Fuzz every parser for a bounded time: with atheris (coverage-guided) where it is installed, else with random damage.

    python tests/fuzz/fuzz_parsers.py [--seconds 300] [--engine auto|atheris|random] [--parser NAME] [--list] [--keep DIR]

A parser may raise a ShoalError and nothing else; what else escapes is printed, kept in DIR, and ends this with status 1. Not part
of `make test`: `make fuzz`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from shoal.util.console import say  # noqa: E402 - found by the path above

OURS = ["shoal", "crypto", "edge_client", "aggregator"]
MOST_BYTES = 1 << 16
ONE_INPUT_S = 30
MEMORY_MB = 4096
GRACE_S = 120
"""Starting and stopping libFuzzer takes so long at most."""


def options(arguments: list[str]) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="of all parsers together")
    parser.add_argument("--engine", choices=["auto", "atheris", "random"], default="auto")
    parser.add_argument("--parser", action="append", default=[], help="only those whose name holds this; repeatable")
    parser.add_argument("--seed", type=int, default=None, help="of random damage; default: another one each time")
    parser.add_argument("--keep", type=Path, default=None, help="folder for inputs that were answered wrongly")
    parser.add_argument("--list", action="store_true", help="print the parsers' names")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen(root: Path, words: list[str]) -> list:
    """Return the parsers that are asked for."""
    from tests.properties.parsers.every import all_parsers

    found = [p for p in all_parsers(root) if not words or any(w in p.name for w in words)]
    if not found:
        sys.exit("no parser of that name: see --list")
    return found


def keep(folder: Path, finding) -> None:
    """Write down an input that was answered wrongly."""
    name = f"{finding.parser}-{hashlib.sha256(finding.data).hexdigest()[:12]}".replace("/", "-").replace(" ", "_")
    (folder / name).write_bytes(finding.data)
    (folder / f"{name}.txt").write_text("".join(traceback.format_exception(finding.error)))


def by_random(parsers: list, asked: argparse.Namespace, folder: Path) -> int:
    """Damage seeds at random, each parser for its part of the time; return how many inputs were tried."""
    from tests.properties.parsers.mutations import hunt

    total, random = 0, Random(asked.seed)
    end = time.monotonic() + asked.seconds
    for left, parser in zip(range(len(parsers), 0, -1), parsers, strict=True):
        done, found = hunt(parser, random, seconds=max(0.0, end - time.monotonic()) / left)
        total += done
        for finding in found:
            keep(folder, finding)
        say(f"{parser.name}: {done} inputs, {len(found)} findings")
    return total


def by_atheris(asked: argparse.Namespace, folder: Path) -> None:
    """Become libFuzzer over all parsers at once: the first byte of an input says which one gets the rest."""
    import atheris

    with atheris.instrument_imports(include=OURS):
        from tests.properties.parsers import disk, wire
        from tests.properties.parsers.mutations import attempt, place
    assert disk
    assert wire
    with tempfile.TemporaryDirectory() as scratch:
        parsers = chosen(Path(scratch), asked.parser)
        corpus = folder / "corpus"
        corpus.mkdir()
        for at, parser in enumerate(parsers):
            for number, seed in enumerate(parser.seeds):
                (corpus / f"{at}-{number}").write_bytes(bytes([at]) + seed)
        seen: set[object] = set()

        def one(data: bytes) -> None:
            if not data:
                return
            finding = attempt(parsers[data[0] % len(parsers)], data[1:])
            if finding is not None and (finding.parser, place(finding.error)) not in seen:
                seen.add((finding.parser, place(finding.error)))
                keep(folder, finding)

        limits = [f"-max_total_time={int(asked.seconds)}", f"-timeout={ONE_INPUT_S}", f"-rss_limit_mb={MEMORY_MB}"]
        quiet = ["-print_final_stats=1", "-verbosity=0", f"-max_len={MOST_BYTES}", f"-artifact_prefix={folder}/"]
        atheris.Setup([sys.argv[0], *limits, *quiet, str(corpus)], one)
        atheris.Fuzz()


def main() -> int:
    """Fuzz as asked; return the status."""
    asked = options(sys.argv[1:])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    engine = asked.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "random"
    if asked.child:
        by_atheris(asked, asked.child)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        if asked.list:
            say("\n".join(p.name for p in chosen(Path(scratch), asked.parser)))
            return 0
        folder = asked.keep or Path(scratch) / "findings"
        folder.mkdir(parents=True, exist_ok=True)
        say(f"engine {engine}, {asked.seconds:g} s")
        if engine == "random":
            (Path(scratch) / "fleet").mkdir()
            total = by_random(chosen(Path(scratch) / "fleet", asked.parser), asked, folder)
            say(f"{total} inputs")
        else:
            # libFuzzer never returns: it gets a process of its own.
            command = [sys.executable, __file__, *sys.argv[1:], "--child", str(folder)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
            status = subprocess.run(command, env=environment, timeout=asked.seconds + GRACE_S, check=False).returncode
            if status:
                say(f"libFuzzer ended with status {status}: a crash, a hang or too much memory")
                return 1
        reports = sorted(folder.glob("*.txt"))
        for report in reports:
            say(f"\n{report.stem}\n{report.read_text()}")
        say(f"{len(reports)} findings")
        return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
