"""Names that other installed packages add by entry points."""

import pytest

from shoal.errors import ConfigError
from shoal.util.extensions import extension_names, load_extension
from tests.helpers.extensions import install
from tests.helpers.refusals import refused

GROUP = "shoal.test-group"


def test_package_is_loaded_when_named(tmp_path, monkeypatch):
    """A package is found by name and loaded only then; one that fails is named, and one that is found twice counts once."""
    for folder in ("a", "b"):
        install(tmp_path / folder, monkeypatch, GROUP, {"one": "ONE", "broken": "TWO"}, "ONE = 1\n")
    failing = "raise RuntimeError('no GPU')\n"
    install(tmp_path / "c", monkeypatch, GROUP, {"two": "ONE"}, failing, package="failing")
    assert extension_names(GROUP) == ["broken", "one", "two"]
    assert load_extension(GROUP, "one") == 1
    assert load_extension(GROUP, "three") is None
    unloaded = "broken of the package extra can't be loaded: AttributeError"
    with refused(ConfigError, unloaded, hint_is="it names extra_module:TWO; does that import?"):
        load_extension(GROUP, "broken")
    with pytest.raises(ConfigError, match="two of the package failing can't be loaded: RuntimeError: no GPU"):
        load_extension(GROUP, "two")


def test_name_of_two_packages_is_refused(tmp_path, monkeypatch):
    """A name that two packages use is refused."""
    for package in ("alpha", "beta"):
        install(tmp_path / package, monkeypatch, GROUP, {"one": "ONE"}, "ONE = 1\n", package=package)
    assert extension_names(GROUP) == ["one"]
    with pytest.raises(ConfigError, match="one is in 2 packages: alpha, beta"):
        load_extension(GROUP, "one")
