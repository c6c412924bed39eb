"""The documents' flow in a real Node-RED answers with the model in use while 50 runs replace it."""

import json
import re
import shutil
import subprocess
import time

import pytest

from edge_client.answers.model_in_use import publish
from shoal.transport.local_broker import free_port
from tests.helpers.models_in_use import NAMED, finish
from tests.helpers.trees import ROOT

RUNS, LIMIT_S = 50, 120.0
FLOW = ROOT / "docs" / "examples" / "node_red_flow.json"
ANSWER = re.compile(r"label: '(\w+)'.*?run: (\d+)", re.DOTALL)

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder of Node-RED with the modules that the page names."""
    npm, made = shutil.which("npm"), tmp_path_factory.mktemp("node-red")
    if npm is None:
        pytest.skip("npm is not installed")
    words = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "node-red", "onnxruntime-node"]
    (made / "package.json").write_text('{"name": "flows", "private": true}')
    done = subprocess.run(words, cwd=made, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"Node-RED can't be installed here: {done.stderr[-200:]}")
    return made


def test_each_answer_is_of_one_model(folder, tmp_path):
    """Twenty messages a second: no error, each label that of its run, and after the last run its model alone."""
    directory, log = tmp_path / "device", tmp_path / "log"
    finish(directory, 1)
    publish(directory)
    flow = json.loads(FLOW.read_text())
    for node in flow:
        if node["type"] == "inject":
            node.update(repeat="0.05", once=True, onceDelay="0.1")
        elif node["type"] == "function":
            node["initialize"] = node["initialize"].replace("/var/lib/shoal-edge", str(directory))
    (folder / "flows.json").write_text(json.dumps(flow))
    settings = {"uiPort": free_port(), "uiHost": "127.0.0.1", "flowFile": "flows.json", "functionExternalModules": True}
    (folder / "settings.js").write_text(f"module.exports = {json.dumps(settings)}\n")
    words = ["node", str(folder / "node_modules" / "node-red" / "red.js"), "-u", str(folder), "-s"]
    with (
        log.open("w") as out,
        subprocess.Popen([*words, str(folder / "settings.js")], stdout=out, stderr=out) as server,
    ):
        try:
            wait_for(lambda: answers(log))
            for run in range(2, RUNS + 2):
                finish(directory, run)
                publish(directory)
                time.sleep(0.1)  # a second process: messages follow real time
            wait_for(lambda: answers(log)[-1][1] == RUNS + 1)
        finally:
            server.terminate()
    found = answers(log)
    assert "[error]" not in log.read_text()
    assert [label for label, _ in found] == [NAMED.labels[run % 3] for _, run in found]
    assert [run for _, run in found] == sorted(run for _, run in found)
    assert len({run for _, run in found}) > RUNS // 2


def answers(log):
    """Return label and run of each answer that Node-RED has printed."""
    return [(label, int(run)) for label, run in ANSWER.findall(log.read_text())]


def wait_for(condition):
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)
