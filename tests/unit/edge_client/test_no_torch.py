"""A device imports neither torch nor the onnx package, in any use of a task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.tasks import logistic_bundle

SCRIPT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx", "onnxscript", "scipy"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import edge_client.learning.scoring, shoal.task.bundle
assert "onnxruntime" not in sys.modules
from pathlib import Path
import numpy as np
from edge_client.answers.inference import export
from edge_client.learning import data
from edge_client.learning import model
from edge_client.learning import training
bundle = shoal.task.bundle.TaskBundle.from_dir(Path(sys.argv[1]))
assert "onnxruntime" not in sys.modules
shares = data.split(data.load(Path(sys.argv[1]) / "d.npz", bundle.manifest), b"s")
backend = model.OrtModel(bundle)
theta = np.zeros(bundle.length, np.float32)
result = training.train(theta, shares.train, bundle.manifest.hyper, backend, np.random.default_rng(0), 0, lambda: False)
losses = edge_client.learning.scoring.score([theta, theta + result.delta], shares.train, backend)
assert edge_client.learning.scoring.choose(losses) == 1, losses
export(bundle, theta + result.delta, Path(sys.argv[1]) / "m.onnx")
assert "torch" not in sys.modules and "onnx" not in sys.modules
print("clean")
"""


def test_everything_runs_without_torch(tmp_path):
    """Load score train and export without torch."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4)).astype(np.float32)
    logistic_bundle().to_dir(tmp_path)
    np.savez(tmp_path / "d.npz", x=x, y=x[:, :3].argmax(1))
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "clean\n"
