"""Directory locks: other programs wait and then fail; the lock of a killed program is released."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from shoal.errors import ConfigError
from shoal.util.files import exclusive, in_use
from tests.helpers.refusals import refused

HINT = "end the other one"
SPAWN = multiprocessing.get_context("spawn")


def hold(directory, held):
    with exclusive(directory, wait_s=0, hint=HINT):
        held.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the directory; killed in the end."""
    held = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_program_is_told(tmp_path, holder):
    with (
        refused(ConfigError, "in use by another program", hint_is=HINT),
        exclusive(tmp_path, wait_s=0, hint=HINT),
    ):
        raise AssertionError("both have it")


def test_it_waits_for_first_and_a_kill_frees(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    with exclusive(tmp_path, wait_s=30, hint=HINT):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_it_is_free_again_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path, wait_s=0, hint=HINT):
        raise ZeroDivisionError
    with exclusive(tmp_path, wait_s=0, hint=HINT):
        pass


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="can't write"), exclusive(tmp_path / "no", wait_s=0, hint=HINT):
        pass


def test_observer_sees_somebody_at_work(tmp_path, holder):
    """Who looks sees whether somebody is at work."""
    (tmp_path / "free").mkdir()
    assert in_use(tmp_path)
    assert not in_use(tmp_path / "free")
    assert not in_use(tmp_path / "none")
    with exclusive(tmp_path / "free", wait_s=0, hint=HINT):
        assert in_use(tmp_path / "free")
    assert not in_use(tmp_path / "free")
    assert [p.name for p in (tmp_path / "free").iterdir()] == [".lock"], "looking leaves no trace of its own"
