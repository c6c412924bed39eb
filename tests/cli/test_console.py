"""The owner's console as processes: help, and a broker that is down."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("program", "commands"),
    [
        ("shoal-fleet", ("status", "run", "models")),
        ("shoal-aggregator", ("serve", "status")),
        ("shoal-edge", ("run", "status")),
    ],
)
def test_help_answers_to_h_in_every_program(call, program, commands):
    told = call(program, "-h")
    assert "-h, --help" in told.out
    assert all(f"\n  {command} " in told.out for command in commands)
    assert told.err == ""
    assert call(program, commands[-1], "-h").out.startswith(f"Usage: {program} {commands[-1]} ")


def test_the_help_of_run_names_each_command(call):
    told = call("shoal-fleet", "run", "-h").out
    assert all(f"\n  {c} " in told for c in ("start", "pause", "resume", "stop", "list", "show", "logs"))


@pytest.mark.parametrize("verb", ["list", "pause"])
def test_a_broker_that_is_down_is_status_5(call, fleet, verb):
    arguments = ("shoal-fleet", "run", verb, "owner", *(["1"] if verb == "pause" else []))
    told = call(*arguments, "--json", status=5)
    assert told.error["type"] == "BrokerUnreachableError"
    assert "error: no MQTT broker can be used at mqtt://127.0.0.1:1" in told.err


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


def test_missing_number_is_a_usage_error(call, fleet):
    """A command without a number is a mistake of usage."""
    for verb in ("pause", "logs"):
        call("shoal-fleet", "run", verb, "owner", status=2)
    call("shoal-fleet", "run", "stop", "owner", "0", status=2)
