"""Own training code with scikit-learn: a linear classifier that `SGDClassifier` trains. See docs/operator/trainer.md.

``python sgd_trainer.py`` writes the layout from which the owner makes the task.
"""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import SGDClassifier

from edge_client.trainer import LocalTraining, Trainer

INPUTS, CLASSES = 4, 3


class SgdTrainer(Trainer):
    """One hyperplane for each class against the others, with logistic loss."""

    name, version = "sgd-logistic", "1"

    def layout(self):
        """Return scikit-learn's `coef_` and `intercept_`."""
        return {"coef": (CLASSES, INPUTS), "intercept": (CLASSES,)}

    def train(self, theta, x, y, recipe: LocalTraining, seed):
        """Take ``epochs`` passes, beginning with ``theta``."""
        own, before = self.split(theta), self.losses(theta, x, y).mean()
        model = SGDClassifier(loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=recipe.lr, random_state=seed)
        model.coef_, model.intercept_ = own["coef"].astype(float), own["intercept"].astype(float)
        for _ in range(recipe.epochs):
            model.partial_fit(x.astype(float), y, classes=np.arange(CLASSES))
        own["coef"][...], own["intercept"][...] = model.coef_, model.intercept_
        return float(before), recipe.epochs * len(x)

    def losses(self, theta, x, y):
        """Return the sum of the classes' logistic losses for each sample."""
        sides = np.where(np.arange(CLASSES) == y[:, None], 1, -1)
        return np.logaddexp(0, -sides * self.predict(theta, x)).sum(1)

    def predict(self, theta, x):
        """Return the distance from each class's hyperplane, (n, classes)."""
        own = self.split(theta)
        return x @ own["coef"].T + own["intercept"]


if __name__ == "__main__":
    np.savez("layout.npz", **{name: np.zeros(shape, np.float32) for name, shape in SgdTrainer().layout().items()})
