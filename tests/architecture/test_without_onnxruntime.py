"""A device works without ONNX Runtime: its programs' modules load, and it trains, ends its runs and predicts with numpy."""

from tests.helpers.trees import python

SCRIPT = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "onnxruntime":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
from pathlib import Path
import numpy as np
import edge_client.program, edge_client.daemon, edge_client.cli
from edge_client.answers import inference
from edge_client.run import finishing
from edge_client.config import EdgeConfig
from edge_client.doctor import diagnose
from tests.helpers.fleets import grouped_data, make_fleet, names

root = Path(sys.argv[1])
with make_fleet(root / "fleet", count=2, rounds=2) as fleet:
    records = fleet.run(10)
    fleet.settle()
    folder = fleet.stage.device_dir(names(2)[0])
assert [r["contributed"] for r in records] == [2, 2, 2], records
data = grouped_data(2)[names(2)[0]]
np.savez(root / "d.npz", x=data.x, y=data.y)
assert len(inference.choose(folder).predict(root / "d.npz")) == len(data.y)
finishing.os.setpriority = lambda *arguments: None
model, choice = finishing.personalise(EdgeConfig(folder, root / "d.npz"))
assert model.run == 1, model
checks = {c.name: c for c in diagnose(EdgeConfig(folder, folder, broker="mqtt://127.0.0.1:1"), with_data=False)}
assert checks["executor"].result == "ok", checks
assert checks["executor"].detail.endswith("which has all operators of the task of run 1"), checks
assert not [name for name in sys.modules if name.split(".")[0] == "onnxruntime"]
print("served")
"""


def test_device_takes_part_without_it(tmp_path):
    """A device takes part in a run without onnx runtime."""
    done = python(SCRIPT, tmp_path)
    assert done.stdout.endswith("served\n"), done.stderr
