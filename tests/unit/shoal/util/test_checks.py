"""How the checks of a doctor are printed, and the exit status that they give."""

import json

import pytest

from shoal.errors import ConfigError, DataError
from shoal.util.checks import EXIT_UNHEALTHY, Check, checked, ok, report

GOOD, POOR, BAD = (
    ok("disk", "9 MiB free"),
    Check("tls", "warning", "none", "use TLS"),
    Check("data", "failure", "-", "x"),
)


def test_an_expected_error_is_a_failure_with_its_hint():
    def fail():
        raise ConfigError("can't read it", hint="chmod") from OSError("denied")

    assert checked("file", fail) == Check("file", "failure", "can't read it: denied", "chmod")
    assert checked("disk", lambda: GOOD) is GOOD


def test_a_bug_is_none():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        checked("file", fail)


def test_warnings_end_with_status_0_and_failures_with_10(capsys):
    report([GOOD, POOR], as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok       disk: 9 MiB free",
        "warning  tls: none",
        "         hint: use TLS",
    ]
    with pytest.raises(SystemExit) as caught:
        report([GOOD, BAD], as_json=False)
    assert caught.value.code == EXIT_UNHEALTHY == 10


def test_as_json_the_checks_come_whole_also_with_a_failure(capsys):
    with pytest.raises(SystemExit):
        report([BAD], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == {"checks": [{"name": "data", "result": "failure", "detail": "-", "advice": "x"}]}


def test_no_error_of_ours_ends_with_the_same_status():
    assert DataError("x").exit_code != EXIT_UNHEALTHY
