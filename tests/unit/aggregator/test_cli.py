"""The commands of `shoal-aggregator`, without a process; `status` has its own file."""

import pytest

from aggregator import cli
from crypto.seal.identity import fingerprint
from shoal.errors import UntrustedError


def test_init_prints_card_and_fingerprint(tmp_path, capsys):
    """Init prints the card for programs and the fingerprint for people."""
    cli.init(tmp_path / "new")
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'new' / 'aggregator.card'}\n"
    assert "fingerprint " in said.err
    assert "shoal-fleet add-aggregator" in said.err


def test_join_says_where_run_files_belong(parties, tmp_path, capsys):
    grant = parties.owner.path / "grants" / "aggregator.grant"
    owner = parties.owner
    grant.write_bytes(owner.grant_for(owner.cards()[0]))
    cli.join(parties.server.directory, grant, owner.fingerprint)
    out, err = capsys.readouterr()
    assert out == "joined fleet reef\n"
    assert err.startswith(f"next: shoal-aggregator serve {parties.server.directory}")


def test_join_names_grant_that_is_refused(parties, tmp_path):
    grant = parties.owner.path / "grants" / "aggregator.grant"
    stranger = fingerprint(parties.members["dev-1"].identity.member)
    with pytest.raises(UntrustedError, match=r"^this grant is from owner "):
        cli.join(parties.server.directory, grant, stranger)
    junk = tmp_path / "junk.grant"
    junk.write_bytes(b"junk")
    with pytest.raises(Exception, match=r"junk.grant") as caught:
        cli.join(parties.server.directory, junk, parties.owner.fingerprint)
    assert "shoal-fleet add-aggregator prints the path of the grant" in caught.value.hint


def test_config_prints_each_source(tmp_path, capsys):
    """Config prints each value with its source."""
    file = tmp_path / "a.toml"
    file.write_text('[aggregator]\ndevice = "cpu"\n')
    cli.show_config(config=file, dir=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("device") and "cpu" in line and "a.toml" in line for line in lines)
    assert any(line.startswith("dir") and str(tmp_path) in line for line in lines)
