"""Images in MNIST's files, for scenarios of images."""

from __future__ import annotations

import pytest

from tests.helpers.mnist import write_bars


@pytest.fixture(scope="session")
def bars(tmp_path_factory):
    """Return a folder with a few images that a small network learns."""
    return write_bars(tmp_path_factory.mktemp("mnist"), seed=0, train=700, test=100)
