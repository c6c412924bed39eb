"""Real programs under a wrong clock (libfaketime): status, page and doctor say so within ten seconds, and what to do."""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
import platform
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from shoal.simulation.process_fleet import Stage
from shoal.transport.local_broker import find_mosquitto, free_port
from tests.helpers import calls, waiting
from tests.helpers.forked_stages import stage_of
from tests.helpers.trees import ONE_THREAD, PROGRAMS, ROOT

LIBRARY = Path(f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1")
pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="faketime is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2")
TOLD_WITHIN_S = 10.0
SETTLED_S = 11.0
"""Until then the aggregator takes a presence for one that may have waited at the broker."""


def wrong_clock(shift):
    """Return the environment of a program whose clock is off by ``shift``, such as -2h; its timers are right."""
    return {"LD_PRELOAD": str(LIBRARY), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@contextlib.contextmanager
def environment(values):
    """Start programs in this body with more variables."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def call(program, *arguments, **more):
    """Call a program, and return its stdout; one with another clock needs an interpreter of its own."""
    words, environment = list(map(str, arguments)), {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    if not more:
        return calls.call(program, words, ROOT, environment).out
    return subprocess.run(
        [sys.executable, "-c", f"from {PROGRAMS[program]} import main; main()", *words],
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout


def data_of(*arguments, **more):
    return json.loads(call(*arguments, "--json", **more))["data"]


def checks(*arguments, **more):
    """Return name -> check of a doctor."""
    return {c["name"]: c for c in data_of(*arguments, **more)["checks"]}


def reasons(data):
    return {d["name"]: (d["reason"], d["advice"]) for d in data["devices"] if d["reason"]}


until = functools.partial(waiting.until, within_s=TOLD_WITHIN_S, pause_s=0.2)


class Fleet:
    """A fleet that trains, with its page."""

    def __init__(self, root, stage):
        self.root, self.stage, self.port = root, stage, free_port()
        self.began_s = 0.0

    def start_aggregator(self):
        self.stage.start_aggregator("--http", f"127.0.0.1:{self.port}")
        until(lambda: self.status()["connected"], within_s=40)
        self.began_s = time.monotonic()

    def start_device(self, name, *more):
        self.stage.start_device(name, self.root / f"{name}.npz", "--personal", "off", *more)

    def settle(self):
        time.sleep(max(0.0, self.began_s + SETTLED_S - time.monotonic()))

    def status(self):
        return data_of("shoal-aggregator", "status", self.stage.aggregator_dir)

    def page(self):
        """Return the record in the page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
        return json.loads(html.unescape(found[1]))["status"]

    def device(self, name):
        return self.stage.device_dir(name)


@pytest.fixture
def fleet(tmp_path):
    with stage_of(tmp_path, NAMES, Stage) as (stage, _):
        yield Fleet(tmp_path, stage)


@pytest.mark.parametrize(
    ("shift", "words"), [("-2h", "2 h behind"), pytest.param("+2h", "2 h ahead of", marks=pytest.mark.long)]
)
def test_a_device_whose_clock_is_wrong(fleet, shift, words):
    fleet.start_aggregator()
    for name in NAMES[:2]:
        fleet.start_device(name)
    until(lambda: sum(bool(d["online"]) for d in fleet.status()["devices"]) == 2, within_s=40)
    fleet.settle()
    with environment(wrong_clock(shift)):
        fleet.start_device("dev-2")
    until(lambda: fleet.status()["devices"][2]["online"], within_s=40)
    said = until(lambda: reasons(fleet.status()).get("dev-2"))
    assert said[0] == f"its clock is {words} the aggregator's"
    assert "set its clock (timedatectl set-ntp true)" in said[1]
    assert reasons(fleet.page())["dev-2"] == said
    found = checks("shoal-aggregator", "doctor", fleet.stage.aggregator_dir)["devices"]
    assert found["result"] == "warning"
    assert f"its clock is {words} the aggregator's: dev-2" in found["detail"]
    if shift.startswith("-"):
        mine = until(lambda: data_of("shoal-edge", "status", fleet.device("dev-2")).get("clock"))
        assert mine.startswith("at least 1 h 59 min behind the aggregator's; set this machine's clock")
        found = checks("shoal-edge", "doctor", fleet.device("dev-2"), **wrong_clock(shift))
        assert (found["clock"]["result"], found["roster"]["result"]) == ("failure", "failure")
        assert "behind the owner's" in found["roster"]["detail"]
        assert "timedatectl" in found["roster"]["advice"]
        expired_by_its_clock(fleet, "dev-1")


def test_an_aggregator_whose_clock_is_wrong(fleet):
    with environment(wrong_clock("-1d")):
        fleet.start_aggregator()
    for name in NAMES:
        fleet.start_device(name)
    until(lambda: sum(bool(d["online"]) for d in fleet.status()["devices"]) == 3, within_s=40)
    wrong = wrong_clock("-1d")
    data = until(
        lambda: (d := data_of("shoal-aggregator", "status", fleet.stage.aggregator_dir, **wrong))["problems"] and d
    )
    (problem,) = data["problems"]
    assert problem["reason"] == "most devices' clocks are 1 d ahead of the aggregator's"
    assert "set the clock of this machine" in problem["advice"]
    assert reasons(data) == {}, "no device is blamed"
    assert fleet.page()["problems"] == [problem]
    found = checks("shoal-aggregator", "doctor", fleet.stage.aggregator_dir, **wrong)
    assert problem["reason"] in found["service"]["detail"]


def expired_by_its_clock(fleet, name):
    """Start a device under a clock that is years ahead: it connects and takes no part, and knows the reason itself."""
    ahead = wrong_clock("+3y")
    fleet.stage.stop(name)
    with environment(ahead):
        fleet.start_device(name)
    until(lambda: "roster_expired" in data_of("shoal-edge", "status", fleet.device(name), **ahead), within_s=40)
    found = checks("shoal-edge", "doctor", fleet.device(name), **ahead)["roster"]
    assert found["result"] == "failure"
    assert "this machine's clock says 20" in found["detail"]
    assert "clock" in found["advice"]
