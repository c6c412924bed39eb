"""Own training code with torch: a detector with a loss of its own, and BatchNorm whose statistics stay on the device.

See docs/operator/trainer.md. A sample is a grey image of 16 x 16, a label is (1, x, y, width, height) of the one object in it, or
five zeros. ``python detector_trainer.py`` writes the layout from which the owner makes the task.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from edge_client.trainer import LocalTraining, Trainer

SIDE = 16
BOX_WEIGHT = 5.0


def detector() -> nn.Module:
    """Return the network: outputs are the logit of an object and its box."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, 5),
    )


def losses_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return each sample's loss: whether there is an object, and if so where."""
    there = y[:, 0]
    boxes = smooth_l1_loss(outputs[:, 1:], y[:, 1:], reduction="none").mean(1)
    return binary_cross_entropy_with_logits(outputs[:, 0], there, reduction="none") + BOX_WEIGHT * there * boxes


class Detector(Trainer):
    """Weights are the fleet's; the running means and variances of BatchNorm are private, so each camera has its own."""

    name, version = "detector", "1"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = detector()
        state = {name: value for name, value in self.net.state_dict().items() if value.is_floating_point()}
        # Private parameters come last.
        self.state = dict(sorted(state.items(), key=lambda item: ".running_" in item[0]))

    def layout(self):
        """Return the floating-point entries of the network's state."""
        return {name: tuple(value.shape) for name, value in self.state.items()}

    def load(self, theta):
        """Put ``theta`` into the network."""
        for name, values in self.split(theta).items():
            self.state[name].copy_(torch.from_numpy(values))

    def train(self, theta, x, y, recipe: LocalTraining, seed):
        """Take ``epochs`` passes of SGD in batches, with FedProx's pull if the owner asks for it."""
        self.load(theta)
        self.net.train()
        images, labels = torch.from_numpy(x), torch.from_numpy(y)
        weights = list(self.net.parameters())
        before = [w.detach().clone() for w in weights]
        optimiser = torch.optim.SGD(weights, lr=recipe.lr, momentum=recipe.momentum)
        draw = torch.Generator().manual_seed(seed)
        size, total, steps = recipe.batch_size or len(x), 0.0, 0
        for _ in range(recipe.epochs):
            for rows in torch.randperm(len(x), generator=draw).split(size):
                loss = losses_of(self.net(images[rows]), labels[rows]).mean()
                pull = sum(((w - b) ** 2).sum() for w, b in zip(weights, before, strict=True))
                optimiser.zero_grad()
                (loss + recipe.prox_mu / 2 * pull).backward()
                if recipe.clip:
                    nn.utils.clip_grad_norm_(weights, recipe.clip)
                optimiser.step()
                total, steps = total + loss.item(), steps + 1
        for name, values in self.split(theta).items():
            values[...] = self.state[name].numpy()
        return total / steps, steps

    @torch.no_grad()
    def losses(self, theta, x, y):
        """Return each sample's loss, with the running statistics."""
        return losses_of(torch.from_numpy(self.predict(theta, x)), torch.from_numpy(y)).numpy()

    @torch.no_grad()
    def predict(self, theta, x):
        """Return the logit and the box for each image, (n, 5)."""
        self.load(theta)
        return self.net.eval()(torch.from_numpy(x)).numpy()


if __name__ == "__main__":
    np.savez("layout.npz", **{name: value.numpy() for name, value in Detector().state.items()})
