"""The tutorial and the operator's guide, line by line: every command in one shell, with real programs and a real broker."""

from __future__ import annotations

import pytest

from shoal.transport.local_broker import find_mosquitto, free_port, start_broker
from tests.helpers.documents import GUIDE, RESEARCH, TUTORIAL, blocks, lines_to_run, pattern, run_script

BROKER_PORT, PAGE_PORT = ":1883", ":9464"
LIMIT_S = 420

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


def run_pages(lines, tmp_path):
    """Run the lines in an empty directory with a broker of their own; return the output of a shell that succeeded."""
    home = tmp_path / "home"
    home.mkdir()
    with start_broker("mosquitto", tmp_path / "broker") as broker:
        port = ":" + broker.url.rpartition(":")[2]
        done = run_script(lines, home, LIMIT_S, {BROKER_PORT: port, PAGE_PORT: f":{free_port()}"})
    assert done.status == 0, done.out + done.errors
    assert "Traceback" not in done.errors
    return done


def test_the_tutorial_works_as_written(tmp_path):
    done = run_pages(lines_to_run(TUTORIAL), tmp_path)
    printed = [line for block in blocks(TUTORIAL, "text") for line in block.lines]
    assert [line for line in printed if not pattern(line).search(done.out)] == [], done.out
    reef = tmp_path / "home" / "reef"
    assert len((reef / "answers.txt").read_text().splitlines()) == 297
    assert "Traceback" not in "".join(path.read_text() for path in reef.glob("*.log"))


def test_tutorial_leaves_installation_out():
    """The tutorial leaves out its installation and the demo only."""
    left_out = [block.lines for block in blocks(TUTORIAL, "sh") if block.reason]
    assert [lines[0] for lines in left_out] == ["sudo apt install make mosquitto python3-venv", "shoal demo --open"]
    assert len(lines_to_run(TUTORIAL)) > 25


@pytest.mark.long
def test_operators_guide_works_as_written(tmp_path):
    """All pages after one another, in one directory; dev-4 has joined and was revoked on the way."""
    lines = [line for name in GUIDE for line in (f"echo '== {name}' | tee /dev/stderr", *lines_to_run(name))]
    done = run_pages(lines, tmp_path)
    assert "run 4: cfl, finished" in done.out
    home = tmp_path / "home"
    assert (home / "models" / "model-0.onnx").exists()
    assert (home / "owner-lost").is_dir()
    assert (home / "owner").is_dir()


def test_researchers_guide_works_as_written(tmp_path):
    """Without its download."""
    done = run_pages(lines_to_run(RESEARCH), tmp_path)
    assert "table-iris" in done.out
    assert (tmp_path / "home" / "iris.json").exists()
