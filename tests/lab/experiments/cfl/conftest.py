"""MNIST's files with images that a small network learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mnist import write_bars


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose label is the height of a bright bar, in MNIST's files."""
    return write_bars(tmp_path_factory.mktemp("mnist"), seed=2, train=900, test=20)
