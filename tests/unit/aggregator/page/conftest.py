"""A run of four devices whose page is never older than a request."""

import pytest

from aggregator.page import feed as feed_module
from tests.helpers.pages import PagePlace, names


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(feed_module, "UPDATE_S", 0.0)
    with PagePlace(tmp_path, names(4)) as made:
        yield made
