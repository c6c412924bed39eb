"""Output folders: neither inside the owner's directory nor with unrelated files."""

import pytest

from shoal.errors import ConfigError
from shoal.owner.keys.outputs import check_output
from tests.helpers.refusals import refused


def check(tmp_path, folder):
    check_output(tmp_path / "owner", folder, ours=("a", "b"), last="b")


def holding(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b"), ("a", "b", "mosquitto.db")])
def test_new_or_empty_folder_is_taken(tmp_path, names):
    """A broker that was started in an earlier one has left its own files there."""
    check(tmp_path, tmp_path / "new")
    check(tmp_path, holding(tmp_path / "out", *names))


@pytest.mark.parametrize("place", ["owner", "owner/out", "elsewhere/../owner", "link"])
def test_the_owners_directory_is_refused(tmp_path, place):
    """However it is written, and though an earlier version has written there."""
    holding(tmp_path / "owner", "a", "b")
    holding(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("owner")
    with refused(ConfigError, "lies in the owner's directory", hint="a separate folder"):
        check(tmp_path, tmp_path / place)


def test_folder_with_other_things_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds other things, such as thesis"):
        check(tmp_path, holding(tmp_path / "home", "a", "thesis"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't read"):
        check(tmp_path, tmp_path / "file")
