"""Write the tables of results, of algorithms, of poison and of models in docs, and that of loads in deploy/README.md.

    python docs/write_results.py --write     # without --write the pages are compared, with exit status 1 if one differs

They come from the table of docs/algorithms.md and from the kept results in results/. --write also draws the growth of long runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal_lab.bench import poison
from shoal_lab.bench.load import soak
from shoal_lab.bench.load import table as load_table
from shoal_lab.experiments.wild.page import choice_table, kinds_table, load

from shoal.report import record

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "results.md"
PAPERS: Final = ("<!-- papers: python docs/write_results.py --write -->", "<!-- end of papers -->")
CHOICE_PAGE: Final = DOCS / "which-algorithm.md"
CHOICE: Final = ("<!-- choice: python docs/write_results.py --write -->", "<!-- end of choice -->")
WILD: Final = ("<!-- wild: python docs/write_results.py --write -->", "<!-- end of wild -->")
POISON_PAGE: Final = DOCS / "poison.md"
POISON: Final = ("<!-- poison: python docs/write_results.py --write -->", "<!-- end of poison -->")
ZOO_PAGE: Final = DOCS / "operator" / "which-models.md"
ZOO: Final = ("<!-- zoo: python docs/write_results.py --write -->", "<!-- end of zoo -->")
LOADS_PAGE: Final = ROOT / "deploy" / "README.md"
GROWTH: Final = DOCS / "pictures" / "growth.png"
LOADS: Final = ("<!-- loads: python docs/write_results.py --write -->", "<!-- end of loads -->")
ROUND: Final = ("<!-- round: python docs/write_results.py --write -->", "<!-- end of round -->")
ROTATED: Final = "digits turned by quarter turns, four groups"
CHOSEN: Final = {
    "ifca-rotated-mnist --algorithm global --devices 1200 --samples 200 --mask permutation": (
        f"Ghosh et al.: {ROTATED}, 1,200 devices",
        "one model",
    ),
    "ifca-rotated-mnist --devices 1200 --samples 200 --mask permutation": ("the same", "IFCA"),
    "ifca-rotated-mnist --devices 2400 --samples 100 --mask permutation": ("the same, 2,400 devices", "IFCA"),
    "ifca-rotated-mnist --devices 4800 --samples 50 --mask permutation": ("the same, 4,800 devices", "IFCA"),
    "fedgroup-mnist-mclr --algorithm fedavg": ("Duan et al.: two digits a device, a linear model", "FedAvg"),
    "fedgroup-mnist-mclr --algorithm fesem": ("the same", "FeSEM"),
    "fedgroup-mnist-mclr --algorithm ifca": ("the same", "IFCA"),
    "fedgroup-mnist-mclr --algorithm fg-edc": ("the same", "FedGroup"),
    "fedgroup-mnist-mlp --algorithm fg-edc": ("the same, a hidden layer", "FedGroup"),
    "fedgroup-synthetic --algorithm fg-edc": ("Duan et al.: synthetic data", "FedGroup"),
    "cfl-label-swap": ("Sattler et al.: two labels swapped in each group", "CFL"),
    "cfl-label-permutation": ("Sattler et al.: labels permuted in each group", "CFL"),
}
"""Rows of the papers' table that the summary has, by their command: the data in words, and the strategy."""


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each line of the tables in a page."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def between(text: str, begin: str) -> str:
    """Return the part of a page from the mark that starts with ``<!-- begin:`` to the next mark."""
    return text.split(f"<!-- {begin}:")[1].split("<!-- end", maxsplit=1)[0]


def papers() -> str:
    """Return the table of the chosen experiments.

    Raises:
        KeyError: docs/algorithms.md has no row for one of them.
    """
    found = {row[0].strip("`"): row for row in rows(between((DOCS / "algorithms.md").read_text(), "results"))}
    lines = ["| data | strategy | published | ours (seeds) | groups found (ARI) |", "|---|---|---|---|---|"]
    for command, (data, strategy) in CHOSEN.items():
        _, _, published, ours, groups, *_ = found[command]
        lines.append(f"| {data} | {strategy} | {published} | {_ours(ours)} | {groups} |")
    return "\n".join(lines)


def _ours(cell: str) -> str:
    """Return the mean over the seeds and their number: ``mean 95.64; 0: 95.45 (last 92.55); 1: ...`` or ``0: 95.43``."""
    seeds = len(re.findall(r"\b\d+: ", cell))
    mean = re.search(r"mean ([\d.]+)", cell)
    value = mean[1] if mean else cell.partition(": ")[2].split(" ")[0]
    return f"{value} ({seeds})"


def models() -> str:
    """Return the table of the models that the compiler takes."""
    lines = [
        "| model | coordinates | gradient graph | CPU s | gradient differs by | executors |",
        "|---|---|---|---|---|---|",
    ]
    for document in record.read_lines(ROOT / "results" / "zoo.jsonl"):
        for row in document["data"]["models"]:
            size, error = f"{row['graph_bytes'] / 1000:.1f} KB", f"{row['gradient_error']:.0e}"
            cells = (
                row["model"],
                f"{row['coordinates']:,}",
                size,
                row["compile_cpu_s"],
                error,
                ", ".join(row["executors"]),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def rounds() -> str:
    """Return the tables of a warm round beside Flower: figures, ratios within the pairs, and parts."""
    rows = [one for one in record.read_lines(ROOT / "results" / "round.jsonl") if "beside" in one["data"]]
    compiled = {True: ", compiled", False: ""}
    names = [f"`{one['data']['mode']}`{compiled['flower-kernel' in one['command']]}" for one in rows]
    kept = [one["data"] for one in rows]
    medians = {f"Shoal, mask {name}": one["medians"]["shoal"] for name, one in zip(names, kept, strict=True)}
    for name, words in (
        ("flower-torch", "Flower, clients with torch"),
        ("flower-numpy", "Flower, clients with numpy alone"),
    ):
        medians[words] = kept[0]["medians"][name]
    lines = [
        "| a round | CPU ms | of it devices | wall ms | peak MB of a device | of the server | MB written | syncs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for words, found in medians.items():
        whole = [
            f"{found[key]:.0f}" for key in ("cpu_ms", "cpu_ms_devices", "wall_ms", "device_peak_mb", "server_peak_mb")
        ]
        lines.append(f"| {words} | {' | '.join(whole)} | {found['written_bytes'] / 1e6:.1f} | {found['syncs']:.0f} |")
    heads = ("mask", "CPU, Flower with torch", "with numpy", "a device's memory, with torch", "with numpy")
    lines += ["", f"| Shoal / {' | '.join(heads)} |".replace("Shoal / mask", "Shoal's mask"), "|---|---|---|---|---|"]
    for mask, one in zip(names, kept, strict=True):
        ratios = [
            f"{one['ratios'][name][key]:.2f}"
            for key in ("cpu_ms", "device_peak_mb")
            for name in ("flower-torch", "flower-numpy")
        ]
        lines.append(f"| {mask} | {' | '.join(ratios)} |")
    lines += ["", "| Shoal's CPU ms by part | training | mask | seal | rest |", "|---|---|---|---|---|"]
    for mask, one in zip(names, kept, strict=True):
        shares = [f"{one['parts'][name]:.0f}" for name in ("training", "mask", "seal", "rest")]
        lines.append(f"| {mask} | {' | '.join(shares)} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Return the pages with their tables as the kept results give them."""
    found = {path: path.read_text() for path in (PAGE, CHOICE_PAGE, POISON_PAGE, LOADS_PAGE, ZOO_PAGE)}
    wild = load()
    for path, (begin, end), table in (
        (PAGE, PAPERS, papers()),
        (PAGE, WILD, kinds_table(wild)),
        (PAGE, ROUND, rounds()),
        (CHOICE_PAGE, CHOICE, choice_table(wild)),
        (POISON_PAGE, POISON, poison.block()),
        (LOADS_PAGE, LOADS, load_table.block()),
        (ZOO_PAGE, ZOO, models()),
    ):
        found[path] = found[path].split(begin)[0] + f"{begin}\n{table}\n{end}" + found[path].split(end)[1]
    return found


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    written = parser.parse_args().write
    for path, text in pages().items():
        if written:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit("run: python docs/write_results.py --write")
    if written:
        kept = [run["data"] for run in record.read_lines(ROOT / load_table.FILE) if "growth" in run["data"]]
        soak.plot([data | data["growth"] for data in kept], GROWTH)


if __name__ == "__main__":
    main()
