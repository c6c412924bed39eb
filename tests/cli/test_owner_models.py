"""`shoal-fleet models`: output, errors and exit statuses, and a folder that is refused before anything is fetched."""

from __future__ import annotations


def test_help_names_both_commands(call):
    told = call("shoal-fleet", "models", "--help").out
    assert "list" in told
    assert "get" in told
    assert "--force" in call("shoal-fleet", "models", "get", "--help").out


def test_no_broker_is_status_5(call, fleet):
    for arguments in (("list", "owner"), ("get", "owner", "--out", "models")):
        made = call("shoal-fleet", "models", *arguments, status=5)
        assert "error: no MQTT broker can be used at mqtt://127.0.0.1:1" in made.err
        assert made.out == ""
    assert not (call.home / "models").exists()
    failed = call("shoal-fleet", "models", "list", "owner", "--json", status=5).error
    assert failed["type"] == "BrokerUnreachableError"


def test_a_directory_of_no_fleet_is_refused(call):
    assert "error: nowhere holds no fleet" in call("shoal-fleet", "models", "list", "nowhere", status=4).err


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
