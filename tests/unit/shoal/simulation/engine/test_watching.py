"""Watching all runs of a block."""

import pytest

from shoal.simulation.engine.watching import current_watch, watched_by


def test_innermost_block_watches():
    """The innermost block watches and outside nobody does."""

    def outer(*_):
        pass

    def inner(*_):
        pass

    assert current_watch() is None
    with watched_by(outer):
        with watched_by(inner):
            assert current_watch() is inner
        assert current_watch() is outer
    assert current_watch() is None


def test_a_block_that_fails_ends_its_watch():
    with pytest.raises(ValueError, match="x"), watched_by(print):
        raise ValueError("x")
    assert current_watch() is None
