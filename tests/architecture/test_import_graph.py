"""The imports between our folders and modules: drawn as they are, without cycles, in folders of a readable size."""

from __future__ import annotations

import pytest

from docs import import_graph as graphs

LARGEST_FOLDER = 20
MOST_ROOMS = 10


@pytest.fixture(scope="module")
def imports():
    return graphs.module_graph()


def test_page_shows_the_imports_as_they_are():
    page = graphs.PAGE.read_text()
    assert page == graphs.with_diagram(page, graphs.diagram()), "run: python docs/import_graph.py --write"


def test_the_page_has_few_rooms_and_no_cycle():
    graph = graphs.rooms()
    assert len(graph) <= MOST_ROOMS
    assert graphs.cycles(graph) == []


def test_no_cycle_between_packages(imports):
    assert graphs.cycles(graphs.contract(imports, graphs.package_of)) == []


def test_no_cycle_between_children(imports):
    """The children of ``shoal`` are packages, and checked above."""
    found = {
        package: graphs.cycles(graphs.contract(imports, graphs.child_of(package)))
        for package in graphs.packages(imports)
        if package != "shoal"
    }
    assert {package: groups for package, groups in found.items() if groups} == {}


def test_no_folder_is_too_large():
    sizes = {folder: len(names) for folder, names in graphs.folders().items()}
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}
    assert len(sizes) > LARGEST_FOLDER, "the search finds the folders"


def test_deferred_imports_count(imports):
    """Imports inside functions and for type checkers count."""
    assert "shoal_lab.bench.rounds" in imports["shoal_lab.bench.cli"]
    assert "shoal.owner.keys.directory" in imports["shoal.owner.keys.run_list"]


def test_cycle_is_found():
    """A cycle is found and an arrow that follows is left out."""
    assert graphs.cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert graphs.reduced({"a": {"b", "c"}, "b": {"c"}, "c": frozenset()}) == {"a": {"b"}, "b": {"c"}, "c": frozenset()}
