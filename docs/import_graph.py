"""Draw the imports between our folders as a Mermaid diagram in docs/architecture.md.

    python docs/import_graph.py --write     # without --write the diagram is printed

An import counts wherever it stands: at the top of a module, inside a function, or for type checkers only. The diagram is
transitively reduced: an arrow that follows from others is left out.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
PACKAGES: Final = ("shoal", "crypto", "edge_client", "aggregator")
BEGIN: Final = "<!-- imports: written by docs/import_graph.py -->"
END: Final = "<!-- end of imports -->"

PARTS: Final = ("shoal.owner", "shoal.simulation", "shoal.membership")
"""The packages of ``shoal`` that the diagram shows by themselves."""
FRONT: Final = ("shoal.cli", "shoal.__main__", "shoal.demo", "shoal.new")
"""The parts of ``shoal`` that import a party's folder or the simulation."""
PROGRAMS: Final = "shoal: cli, demo, new"
SHARED: Final = "shoal: shared by all"

Graph = Mapping[str, frozenset[str]]
"""For each node the nodes that it imports, itself excluded."""


def modules() -> dict[str, Path]:
    """Return the file of each module, by import name; a package's name stands for its ``__init__``."""
    roots = [*(ROOT / name for name in PACKAGES), ROOT / "lab" / "shoal_lab"]
    files = {p.relative_to(root.parent).with_suffix("").parts: p for root in roots for p in root.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in files.items()}


def module_graph() -> Graph:
    """Return the modules that each of our modules imports."""
    files = modules()
    return {name: frozenset(_imports(path, files)) - {name} for name, path in files.items()}


def _imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            yield from [p for p in prefixes if p in known][:1]


def contract(graph: Graph, node_of: Callable[[str], str | None]) -> Graph:
    """Return the graph of groups of modules; ``node_of`` names a module's group, or gives None to leave the module out."""
    found: dict[str, set[str]] = {}
    for module, imported in graph.items():
        node = node_of(module)
        if node is not None:
            others = {node_of(m) for m in imported} - {node, None}
            found.setdefault(node, set()).update(n for n in others if n)
    return {node: frozenset(others) for node, others in found.items()}


def package_of(module: str) -> str:
    """Return a module's package: ``aggregator``, or a subpackage or module of ``shoal``."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "shoal" else 1])


def room_of(module: str) -> str | None:
    """Return a module's node in the diagram: a party's folder, a half of ``crypto``, or what a part of ``shoal`` is for."""
    top, *below = module.split(".")
    if top == "crypto":
        # Seals and sums are for every party, masks for devices and the owner alone.
        return {"mask": "crypto.mask"}.get(below[0], "crypto.seal") if below else None
    package = package_of(module)
    if not package.startswith("shoal.") or package in PARTS:
        return package if package != "shoal" else PROGRAMS
    return PROGRAMS if package in FRONT else SHARED


def child_of(package: str) -> Callable[[str], str | None]:
    """Return a function that names the child of ``package`` that a module belongs to, None for modules outside."""

    def node(module: str) -> str | None:
        if module == package:
            return "__init__"
        return module[len(package) + 1 :].split(".", 1)[0] if module.startswith(package + ".") else None

    return node


def reachable(graph: Graph, start: str) -> frozenset[str]:
    """Return the nodes that ``start`` imports, directly or through others."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(graph.get(node, ()))
    return frozenset(found)


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that import each other in a circle, each sorted."""
    reach = {node: reachable(graph, node) for node in graph}
    found = {tuple(sorted(n for n in reach[node] if node in reach.get(n, ()))) for node in graph if node in reach[node]}
    return [list(group) for group in sorted(found)]


def reduced(graph: Graph) -> Graph:
    """Return an acyclic graph without the arrows that follow from others."""
    reach = {node: reachable(graph, node) for node in graph}
    return {
        node: frozenset(n for n in targets if not any(n in reach.get(other, ()) for other in targets))
        for node, targets in graph.items()
    }


def rooms() -> Graph:
    """Return the imports between the rooms of the diagram."""
    return contract(module_graph(), room_of)


def diagram() -> str:
    """Return the diagram of our rooms as a Mermaid block, importers above what they import."""
    graph = reduced(rooms())
    arrows = sorted((node, target) for node, targets in graph.items() for target in targets)
    names = {node: re.sub(r"\W+", "_", node) for arrow in arrows for node in arrow}
    lines = [f'    {name}["{node.replace(".", "/")}"]' for node, name in sorted(names.items())]
    lines += [f"    {names[node]} --> {names[target]}" for node, target in arrows]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def with_diagram(page: str, block: str) -> str:
    """Return the page's text with ``block`` between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:before]}\n{block}\n{page[after:]}"


def folders() -> dict[str, list[str]]:
    """Return the modules directly in each package, ``__init__`` excluded."""
    found: dict[str, list[str]] = {}
    for path in modules().values():
        if path.name != "__init__.py":
            found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.name)
    return found


def packages(names: Iterable[str]) -> list[str]:
    """Return the names that other names begin with: the packages among them."""
    return sorted({".".join(parts[:n]) for parts in (m.split(".") for m in names) for n in range(1, len(parts))})


def main() -> None:
    """Print the diagram, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the diagram into docs/architecture.md")
    block = diagram()
    if parser.parse_args().write:
        PAGE.write_text(with_diagram(PAGE.read_text(), block))
    else:
        print(block)  # noqa: T201


if __name__ == "__main__":
    main()
