"""Three devices of a run with round keys."""

import pytest

from tests.helpers.round_runs import NAMES, Scene


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path, *NAMES)


@pytest.fixture
def models(scene):
    return {name: scene.device(name) for name in NAMES}
