"""The state diagrams in docs/architecture.md are the ones that the transition tables generate."""

import importlib
import re

import pytest

from tests.helpers.trees import ROOT

PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"<!-- diagram: (\S+) -->\n```mermaid\n(.*?)\n```\n<!-- end of diagram -->", re.DOTALL)
MODULES = ("aggregator.uploads.states", "aggregator.rounds.phases", "edge_client.protocol.round_state")


def diagrams():
    """Return module -> diagram on the page."""
    return dict(BLOCK.findall(PAGE.read_text()))


def test_every_table_has_its_diagram_on_the_page():
    assert set(diagrams()) == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_the_diagram_is_up_to_date(module):
    """To update it, replace the block on the page by the output of the module's ``diagram()``."""
    assert diagrams()[module] == importlib.import_module(module).diagram()
