"""`shoal-fleet models`: output, errors and exit statuses, and a folder that is refused before anything is fetched."""

from __future__ import annotations


def test_help_names_both_commands(call):
    told = call("shoal-fleet", "models", "--help").out
    assert "list" in told
    assert "get" in told
    assert "--force" in call("shoal-fleet", "models", "get", "--help").out


def test_unsuitable_folder_is_refused_first(call, fleet):
    """An unsuitable folder is refused before the broker is asked."""
    made = call("shoal-fleet", "models", "get", "owner", "--out", "owner/models", status=3)
    assert "lies in the owner's directory" in made.err
    (call.home / "models").mkdir()
    (call.home / "models" / "model-0.onnx").write_bytes(b"")
    made = call("shoal-fleet", "models", "get", "owner", "--out", "models", status=3)
    assert "error: models holds models already, such as model-0.onnx\n" in made.err
    assert "hint: give another folder, or --force to replace them\n" in made.err


def test_run_number_below_1_is_usage_error(call, fleet):
    """A run number below 1 is a mistake of usage."""
    call("shoal-fleet", "models", "get", "owner", "0", "--out", "models", status=2)
