"""The state diagrams in docs/architecture.md are the ones that the transition tables generate."""

import re

import pytest

from aggregator.rounds import state as rounds
from aggregator.rounds.state import RunPhase
from aggregator.uploads import states
from aggregator.uploads.states import UploadState
from edge_client.protocol import round_state
from edge_client.protocol.round_state import Stage
from tests.helpers.trees import ROOT

PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"<!-- diagram: (\S+) -->\n```mermaid\n(.*?)\n```\n<!-- end of diagram -->", re.DOTALL)


def of_uploads():
    return [(a.value, b.value, event.value) for (a, event), b in states.TRANSITIONS.items()]


def of_phases():
    changes = [(a.value, b.value, label) for (a, b), label in rounds.TRANSITIONS.items()]
    return [*changes, (RunPhase.FINISHED.value, "[*]", "")]


def of_rounds():
    changes = round_state.TRANSITIONS.items()
    return [(a.name.lower(), b.name.lower(), " / ".join(causes.values())) for (a, b), causes in changes]


TABLES = {
    "aggregator.uploads.states": (UploadState.RECEIVING.value, of_uploads),
    "aggregator.rounds.state": (RunPhase.GATHERING.value, of_phases),
    "edge_client.protocol.round_state": (Stage.IDLE.name.lower(), of_rounds),
}


def diagram(first, changes):
    """Return a table of transitions as a Mermaid state diagram."""
    lines = [f"    {before} --> {after}{label and f': {label}'}" for before, after, label in changes]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {first}", *lines])


def diagrams():
    """Return module -> diagram on the page."""
    return dict(BLOCK.findall(PAGE.read_text()))


def test_every_table_has_its_diagram_on_page():
    assert set(diagrams()) == set(TABLES)


@pytest.mark.parametrize("module", TABLES)
def test_the_diagram_is_up_to_date(module):
    """To update it, replace the block on the page by the output of ``diagram``."""
    first, changes = TABLES[module]
    assert diagrams()[module] == diagram(first, changes())
