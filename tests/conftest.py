"""What every test directory shares."""

import functools

import pytest

from tests.helpers.tasks import logistic_bundle


@pytest.fixture(scope="session")
def logistic():
    """Return a function (inputs, classes) -> bundle of logistic regression, made once a session."""
    return functools.cache(logistic_bundle)
