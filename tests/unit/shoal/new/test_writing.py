"""Writing the files of a start."""

import pytest

from shoal.errors import ConfigError
from shoal.new import cli


def test_names_fill_the_templates(tmp_path):
    """Names stand where the templates have them."""
    paths = cli.write_start("strategy", "two-words", tmp_path / "new")
    text = (tmp_path / "new" / "two_words.py").read_text()
    assert "class TwoWords(shoal.FedAvg):" in text
    assert [path.name for path in paths] == ["pyproject.toml", "test_two_words.py", "two_words.py"]


def test_folder_that_cannot_be_made_is_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="can't write"):
        cli.write_start("task", "idea", tmp_path / "file" / "new")


def test_missing_templates_are_told(tmp_path, monkeypatch):
    """An installation without templates is told."""
    monkeypatch.setattr(cli, "files", lambda _: tmp_path)
    (tmp_path / "templates" / "task").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no templates for a task"):
        cli.write_start("task", "idea", tmp_path / "new")
