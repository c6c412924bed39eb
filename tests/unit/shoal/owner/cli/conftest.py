"""The aggregator of a fleet on the loopback driver, which answers the owner's commands."""

import pytest


@pytest.fixture
def answering(monkeypatch):
    """Let the owner's requests go to a loopback fleet instead of an MQTT broker."""

    def to(fleet):
        def ask(_fleet, _wait, _tell, action, **parts):
            question = fleet.ask(action, **parts)
            return question.document(), question.answer.answered_at_s

        monkeypatch.setattr("shoal.owner.console.asking.ask", ask)
        return fleet

    return to
