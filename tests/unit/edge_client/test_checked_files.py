"""Files that end with the SHA-256 of everything before."""

import pytest

from edge_client.checked_files import make_folder, verified, write_checked
from shoal.errors import ConfigError, IntegrityError


@pytest.mark.parametrize("head", [b"", b"head", bytes(1000)])
def test_the_content_comes_back(tmp_path, head):
    write_checked(tmp_path / "f", head)
    assert bytes(verified(tmp_path / "f", (tmp_path / "f").read_bytes(), "")) == head


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[1:], lambda d: bytes([d[0] ^ 1]) + d[1:], lambda _: b""]
)
def test_damage_is_an_error_with_the_hint(tmp_path, damage):
    write_checked(tmp_path / "f", b"head")
    with pytest.raises(IntegrityError, match="f is damaged") as caught:
        verified(tmp_path / "f", damage((tmp_path / "f").read_bytes()), "remove it")
    assert caught.value.hint == "remove it"


def test_a_folder_is_private_and_made_once(tmp_path):
    make_folder(tmp_path / "d")
    make_folder(tmp_path / "d")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="can't write"):
        make_folder(tmp_path / "file")
