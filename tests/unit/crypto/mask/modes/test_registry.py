"""The registry of mask modes."""

from __future__ import annotations

import pytest

from crypto.mask.modes.registry import MODES, find
from shoal.errors import ConfigError


def test_registry_is_in_order() -> None:
    """The registry has the modes of the design in order."""
    assert list(MODES) == ["none", "permutation", "signed-permutation", "rotation"]


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_found_by_its_name(name: str) -> None:
    assert find(name).name == name


def test_unknown_mode_is_refused() -> None:
    """An unknown mode is refused with the names of all."""
    with pytest.raises(ConfigError, match="'rotate'") as refused:
        find("rotate")
    assert all(name in refused.value.hint for name in MODES)


def test_a_mode_can_not_be_added_at_run_time() -> None:
    """A mode is a file and a line of the registry, so that all parties have the same ones."""
    with pytest.raises(TypeError):
        MODES["mine"] = MODES["none"]  # type: ignore[index]
