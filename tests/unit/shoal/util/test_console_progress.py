"""Work that takes long says so; short work says nothing."""

import re
import threading
import time

import pytest

from shoal.util.console import working


def test_short_work_says_nothing(capsys):
    with working("counting"):
        pass
    assert capsys.readouterr().err == ""


def test_long_work_says_so_until_its_end(capsys):
    """Long work says so again and again until its end."""
    with working("counting", after_s=0.02, every_s=0.02):
        time.sleep(0.3)
    told = capsys.readouterr().err.splitlines()
    assert len(told) >= 3
    assert all(re.fullmatch(r"counting: \d s", line) for line in told)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_an_error_ends_it(capsys):
    with pytest.raises(ValueError, match="no"), working("counting", after_s=0.5):
        raise ValueError("no")
    time.sleep(0.6)
    assert capsys.readouterr().err == ""
