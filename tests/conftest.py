"""What every test directory shares."""

import functools
import os
import signal

import pytest
from hypothesis import settings

from tests.helpers.tasks import logistic_bundle

# Before any test imports ONNX Runtime: it would write a device identifier into the home directory and report models.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# A shell starts background jobs with SIGINT ignored, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's matter.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def logistic():
    """Return a function (inputs, classes) -> bundle of logistic regression, made once a session."""
    return functools.cache(logistic_bundle)
