"""An owner, an aggregator and a broker, and one enrolment line."""

import pytest

from tests.helpers.enrolments import Scene


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


@pytest.fixture
def token(scene):
    return scene.token()
