"""A fleet of real programs, each of the software that the test chooses: today's, the last release's, or a later one's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys

import numpy as np

from shoal.simulation.process_fleet import Stage
from shoal.transport.local_broker import start_broker
from tests.helpers.tasks import CLASSES, INPUTS
from tests.helpers.trees import ROOT

COMPAT = ROOT / "tests/compat"
RELEASED, TODAY = "released", "today"


def kept_wheel():
    """Return the wheel of the last release, after comparing its checksum, and its version."""
    (wheel,) = COMPAT.glob("shoal-*.whl")
    line = f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"
    assert (COMPAT / "SHA256SUMS").read_text() == line
    return wheel, wheel.name.split("-")[1]


def install(wheel, folder):
    """Install a wheel without its dependencies, which are those of this interpreter."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", folder, wheel],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class MixedStage(Stage):
    """A stage whose programs run different software.

    Attributes:
        released: folder of the last release's packages.
        software: by program, RELEASED or the settings of tests/compat/later/sitecustomize.py; all others run today's.
    """

    def __init__(self, *arguments, released, software):
        self.released, self.software = released, software
        super().__init__(*arguments)

    def _software(self, name, package):
        wanted = self.software.get(name, TODAY)
        if wanted == RELEASED:
            # The folder in which `python -c` starts comes first on its path, and before an editable installation.
            return f"from {package}.cli import main; main()", self.released, {"PYTHONPATH": str(self.released)}
        start, _, _ = super()._software(name, package)
        if wanted == TODAY:
            return start, ROOT, {"PYTHONPATH": str(ROOT)}
        later = {"PYTHONPATH": f"{COMPAT / 'later'}:{ROOT}", "SHOAL_TEST_LATER": json.dumps(wanted)}
        return start, ROOT, later

    def log(self, name):
        """Return the log of a program."""
        return (self.root / "logs" / f"{name}.log").read_text()


@contextlib.contextmanager
def mixed_stage(root, released, software, devices):
    """Yield a stage at a broker of its own, with data for each device in ``root/NAME.npz``."""
    for seed, name in enumerate(devices):
        x = np.random.default_rng(seed).standard_normal((60, INPUTS)).astype(np.float32)
        np.savez(root / f"{name}.npz", x=x, y=x[:, :CLASSES].argmax(axis=1))
    (root / "broker").mkdir()
    with start_broker("mosquitto", root / "broker") as broker:
        stage = MixedStage(root / "stage", broker.url, devices, released=released, software=software)
        with stage:
            yield stage
