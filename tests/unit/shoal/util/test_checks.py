"""How the checks of a doctor are printed, and the exit status that they give."""

import json

import pytest

from shoal.errors import ConfigError, DataError
from shoal.util.console import EXIT_UNHEALTHY, Check, checked, ok, report

GOOD, POOR, BAD = (
    ok("disk", "9 MiB free"),
    Check("tls", "warning", "none", "use TLS"),
    Check("data", "failure", "-", "x"),
)


def test_expected_error_is_a_failure():
    """An expected error is a failure with its hint."""

    def fail():
        raise ConfigError("can't read it", hint="chmod") from OSError("denied")

    assert checked("file", fail) == Check("file", "failure", "can't read it: denied", "chmod")
    assert checked("disk", lambda: GOOD) is GOOD


def test_a_bug_is_none():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        checked("file", fail)


def test_warnings_end_with_0_failures_10(capsys):
    """Warnings end with status 0 and failures with 10."""
    report([GOOD, POOR], as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok       disk: 9 MiB free",
        "warning  tls: none",
        "         hint: use TLS",
    ]
    with pytest.raises(SystemExit) as caught:
        report([GOOD, BAD], as_json=False)
    assert caught.value.code == EXIT_UNHEALTHY == 10


def test_json_has_all_checks(capsys):
    """As json the checks come whole also with a failure."""
    with pytest.raises(SystemExit):
        report([BAD], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == {"checks": [{"name": "data", "result": "failure", "detail": "-", "advice": "x"}]}


def test_no_other_error_ends_with_it():
    """No error of ours ends with the same status."""
    assert DataError("x").exit_code != EXIT_UNHEALTHY
