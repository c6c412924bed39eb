"""The options by which a device reads its files."""

from __future__ import annotations

import pytest

from edge_client.learning.reading import AS_FOUND, Reading
from shoal.errors import ConfigError


def test_a_separator_is_one_character_or_tab():
    assert [Reading(separator=text).separator for text in ("", ";", "tab")] == ["", ";", "\t"]
    assert Reading() == AS_FOUND
    for text in (";;", '"', "\n", "\0"):
        with pytest.raises(ConfigError, match="is one character or tab") as caught:
            Reading(separator=text)
        assert "leave it out" in caught.value.hint
