"""A fleet of real programs, some of which run software of another version."""

from __future__ import annotations

import contextlib
import json

import numpy as np

from shoal.simulation.process_fleet import Stage
from shoal.transport.local_broker import start_broker
from tests.helpers.tasks import CLASSES, INPUTS
from tests.helpers.trees import ROOT

OTHER = ROOT / "tests/integration/later"


class MixedStage(Stage):
    """A stage whose programs run different software.

    Attributes:
        software: program -> the settings of tests/integration/later/sitecustomize.py; all others run today's.
    """

    def __init__(self, *arguments, software):
        self.software = software
        super().__init__(*arguments)

    def _software(self, name, package):
        start, _, _ = super()._software(name, package)
        wanted = self.software.get(name)
        if wanted is None:
            return start, ROOT, {"PYTHONPATH": str(ROOT)}
        return start, ROOT, {"PYTHONPATH": f"{OTHER}:{ROOT}", "SHOAL_TEST_LATER": json.dumps(wanted)}

    def log(self, name):
        """Return the log of a program."""
        return (self.root / "logs" / f"{name}.log").read_text()


@contextlib.contextmanager
def mixed_stage(root, software, devices):
    """Yield a stage at a broker of its own, with data for each device in ``root/NAME.npz``."""
    for seed, name in enumerate(devices):
        x = np.random.default_rng(seed).standard_normal((60, INPUTS)).astype(np.float32)
        np.savez(root / f"{name}.npz", x=x, y=x[:, :CLASSES].argmax(axis=1))
    (root / "broker").mkdir()
    with (
        start_broker("mosquitto", root / "broker") as broker,
        MixedStage(root / "stage", broker.url, devices, software=software) as stage,
    ):
        yield stage
