"""Names that other installed packages add by entry points."""

import pytest

from shoal.errors import ConfigError
from shoal.util.extensions import extension_names, load_extension
from tests.helpers.extensions import install
from tests.helpers.refusals import refused

GROUP = "shoal.test-group"


def test_package_is_loaded_when_named(tmp_path, monkeypatch):
    """A package is found by name and loaded only then."""
    install(tmp_path, monkeypatch, GROUP, {"one": "ONE", "broken": "TWO"}, "ONE = 1\n")
    assert extension_names(GROUP) == ["broken", "one"]
    assert load_extension(GROUP, "one") == 1
    assert load_extension(GROUP, "three") is None
    with refused(
        ConfigError,
        "broken of the package extra can't be loaded: AttributeError",
        hint_is="it names extra_module:TWO; does that import?",
    ):
        load_extension(GROUP, "broken")


def test_a_package_that_fails_is_named(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, GROUP, {"one": "ONE"}, "raise RuntimeError('no GPU')\n", package="failing")
    with pytest.raises(ConfigError, match="one of the package failing can't be loaded: RuntimeError: no GPU"):
        load_extension(GROUP, "one")


def test_name_of_two_packages_is_refused(tmp_path, monkeypatch):
    """A name that two packages use is refused."""
    for package in ("alpha", "beta"):
        install(tmp_path / package, monkeypatch, GROUP, {"one": "ONE"}, "ONE = 1\n", package=package)
    assert extension_names(GROUP) == ["one"]
    with pytest.raises(ConfigError, match="one is in 2 packages: alpha, beta"):
        load_extension(GROUP, "one")


def test_twice_found_counts_once(tmp_path, monkeypatch):
    """A package that is found twice counts once."""
    for folder in ("a", "b"):
        install(tmp_path / folder, monkeypatch, GROUP, {"one": "ONE"}, "ONE = 1\n")
    assert load_extension(GROUP, "one") == 1
