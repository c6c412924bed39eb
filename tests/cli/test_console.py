"""The owner's console as processes: help, and a broker that is down."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("program", "commands"),
    [
        ("shoal-fleet", ("status", "run", "models")),
        ("shoal-fleet run", ("start", "pause", "resume", "stop", "list", "show", "logs")),
        ("shoal-aggregator", ("serve", "status")),
        ("shoal-edge", ("run", "status")),
    ],
)
def test_help_answers_to_h_in_every_program(call, program, commands):
    told = call(*program.split(), "-h")
    assert "-h, --help" in told.out
    assert [command for command in commands if f"\n  {command} " not in told.out] == []
    assert told.err == ""
    assert call(*program.split(), commands[-1], "-h").out.startswith(f"Usage: {program} {commands[-1]} ")


def test_silent_broker_blames_no_device(call, fleet):
    """Status says that the broker did not answer and blames no device."""
    told = call("shoal-fleet", "status", "owner")
    first, problem, hint, *owner = told.out.splitlines()
    assert first == "fleet reef, aggregator: no answer"
    assert problem.startswith("problem: no MQTT broker can be used at mqtt://127.0.0.1:1")
    assert hint.startswith("  hint: start the broker")
    assert owner[-1] == "pending approvals: unknown"
    assert "dev-1" not in told.out
    data = call("shoal-fleet", "status", "owner", "--json").data
    assert (data["running"], data["connected"], data["owner"]["devices"]) == (None, None, 1)
