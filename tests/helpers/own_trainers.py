"""Own training code for tests, as an operator writes it: one that works, and some that fail in one way each."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from edge_client.learning.executor.choice import TrainerCommand
from edge_client.trainer import Trainer
from shoal.task.bundle import Parameter, TaskBundle
from shoal.task.manifest import TrainerName
from tests.helpers.tasks import CLASSES, INPUTS, manifest


class Softmax(Trainer):
    """Multinomial logistic regression by plain gradient steps on all samples; a private count of the rounds it has trained."""

    name, version = "softmax", "1"

    def layout(self):
        return {"weight": (INPUTS, CLASSES), "rounds": ()}

    def train(self, theta, x, y, recipe, _seed):
        own, loss = self.split(theta), self.losses(theta, x, y).mean()
        for _ in range(recipe.epochs):
            outputs = self.predict(theta, x)
            residual = np.exp(outputs - outputs.max(1, keepdims=True))
            residual /= residual.sum(1, keepdims=True)
            residual[np.arange(len(y)), y] -= 1
            own["weight"] -= recipe.lr / len(x) * x.T @ residual
        own["rounds"] += 1
        return float(loss), recipe.epochs

    def losses(self, theta, x, y):
        outputs = self.predict(theta, x)
        top = outputs.max(1)
        return top + np.log(np.exp(outputs - top[:, None]).sum(1)) - outputs[np.arange(len(y)), y]

    def predict(self, theta, x):
        return x @ self.split(theta)["weight"]


class Newer(Softmax):
    version = "2"


class Wider(Softmax):
    def layout(self):
        return {"weight": (INPUTS, CLASSES + 1), "rounds": ()}


class Raises(Softmax):
    def train(self, *_):
        raise RuntimeError("the camera is gone")


class Exits(Softmax):
    def train(self, *_):
        sys.exit(3)


class Dies(Softmax):
    def train(self, *_):
        os.abort()


class Hangs(Softmax):
    def train(self, *_):
        time.sleep(1000)


class Begins(Softmax):
    """Begins a process of its own."""

    def correct(self, *_):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return 0


class Eats(Softmax):
    def train(self, *_):
        return float(np.ones(1 << 40).sum()), 1


class NotFinite(Softmax):
    def train(self, theta, *_):
        theta[:] = math.nan
        return 0.0, 1


class Short(Softmax):
    def losses(self, theta, x, y):
        return super().losses(theta, x, y)[:-1]


class Chatters(Softmax):
    """Writes to stdout and stderr, and looks at what it has been given."""

    def correct(self, *_):
        sys.stdout.write("on stdout\n")
        sys.stderr.write("on stderr\n")
        assert "SHOAL_PASSPHRASE_FILE" not in os.environ
        return len(list(Path("/proc/self/fd").iterdir()))


def command(trainer=Softmax, **limits):
    """Return the command of a class of this module."""
    return TrainerCommand(f"{__name__}:{trainer.__name__}", **limits)


def bundle(**changes):
    """Return a task for `Softmax`, with a private count of rounds."""
    layout = (Parameter("weight", (INPUTS, CLASSES), "cluster"), Parameter("rounds", (), "private"))
    fields = {"name": "own", "parameters": layout, "opset": 0, "trainer": TrainerName("softmax", "1")}
    made = manifest(**(fields | changes))
    return TaskBundle.seal_digests(made, b"", b"", b"", bytes(4 * made.private_length))
