"""A device's configuration.

Metered hours of a device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from typer.testing import CliRunner

from edge_client import program
from edge_client.config import EdgeConfig, Hours, ditto_weight, parse_hours
from shoal.errors import ConfigError
from shoal.util.config import Layers, Setting, read, settings_in
from shoal.util.options import new_app, options_of


def config(**changes):
    return EdgeConfig(**{"dir": Path("d"), "data": Path("x.npz"), **changes})


@pytest.mark.parametrize("threads", [0, -3])
def test_fewer_threads_than_one_are_refused(threads):
    with pytest.raises(ConfigError, match=f"^threads must be at least 1, not {threads}$"):
        config(threads=threads)
    assert config(threads=1).threads == 1


@pytest.mark.parametrize("setting", ["auto", "onnxruntime", "numpy"])
def test_the_executor_is_one_of_three(setting):
    assert config(executor=setting).executor == setting
    with pytest.raises(ConfigError, match=f"executor is auto, onnxruntime or numpy, not 'x{setting}'"):
        config(executor=f"x{setting}")


def test_brokers_address_is_not_shown():
    """The brokers address is not shown since it may hold a password."""
    assert "s3cret" not in repr(config(broker="mqtts://dev-1:s3cret@broker"))


def test_default_is_the_grants_broker():
    """By default a device stays and takes the grants broker."""
    made = config()
    assert (made.broker, made.threads, made.once, made.log) == ("", 1, False, "info")


@pytest.mark.parametrize(("text", "weight"), [("on", 0.0), ("off", 0.0), ("0.5", 0.5), ("1e6", 1e6)])
def test_personal_finish_is_on_off_or_weight(text, weight):
    made = config(personal=text)
    assert ditto_weight(made.personal) == weight
    assert made.finishes == (text != "off")


@pytest.mark.parametrize("text", ["", "maybe", "0", "-1", "nan", "inf", "2e6"])
def test_another_personal_finish_is_refused(text):
    with pytest.raises(ConfigError, match="personal is on, off, or a weight above 0 and up to 1e\\+06"):
        config(personal=text)


@pytest.mark.parametrize("rate", [7.9, -1.0, 2e6, float("nan")])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="max_kbps is 0, for no limit, or from 8 to 1e\\+06"):
        config(max_kbps=rate)
    assert config(max_kbps=8.0).max_kbps == 8


def test_metered_hours_are_checked_at_start():
    assert config(metered="22:00-06:00").metered == "22:00-06:00"
    with pytest.raises(ConfigError, match="metered is two different times of day"):
        config(metered="22-06")


@dataclass(frozen=True, slots=True)
class Extended(EdgeConfig):
    """The settings of a device that has one more."""

    ballast: Annotated[Path | None, Setting("Sand to carry.", shown="none")] = None


def test_a_new_setting_is_one_declaration(monkeypatch, tmp_path):
    """Option, variable, key of the file, line of `config` and plain start follow from it."""
    app, taken = new_app("A device."), []

    @app.command()
    @options_of(Extended)
    def run(layers: Layers[Extended]) -> None:
        taken.append(layers.config())

    device = ["dev-1", "--data", "x.npz"]
    (tmp_path / "edge.toml").write_text('[edge]\nballast = "file"\n')
    for more, environment in (
        (["--ballast", "flag"], {}),
        ([], {"SHOAL_EDGE_BALLAST": "env"}),
        (["--config", str(tmp_path / "edge.toml")], {}),
    ):
        assert CliRunner().invoke(app, [*device, *more], env=environment).exit_code == 0
    assert [config.ballast for config in taken] == [Path("flag"), Path("env"), Path("file")]
    assert "Sand to carry." in CliRunner().invoke(app, ["--help"]).output
    assert read(Extended, environment={}).document()["ballast"] == {"value": None, "source": "default"}

    monkeypatch.setattr(program, "EdgeConfig", Extended)
    assert program.plain_run(["run", *device, "--ballast", "flag"])["ballast"] == Path("flag")


def test_every_setting_is_explained():
    assert [name for name, setting in settings_in(EdgeConfig).items() if not setting.help.endswith(".")] == []


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("08:00-20:00", ("08:00", "19:59"), ("07:59", "20:00", "00:00")),
        ("22:00-06:30", ("22:00", "23:59", "00:00", "06:29"), ("06:30", "21:59")),
        ("00:00-23:59", ("00:00", "12:00"), ("23:59",)),
    ],
)
def test_hours_hold_their_first_minute(text, inside, outside):
    """Hours hold their first minute and not their last."""
    hours = parse_hours(text)
    assert str(hours) == text

    def minute(at):
        return 60 * int(at[:2]) + int(at[3:])

    assert all(hours.contains(minute(at)) for at in inside)
    assert not any(hours.contains(minute(at)) for at in outside)


def test_no_text_means_no_hours():
    assert parse_hours("") is None


@pytest.mark.parametrize(
    "text", ["8:00-20:00", "24:00-01:00", "08:60-09:00", "08:00", "08:00-08:00", "day", "08:00-20:00 "]
)
def test_other_texts_show_an_example(text):
    """Other texts are refused with an example."""
    with pytest.raises(ConfigError, match="metered is two different times of day") as error:
        parse_hours(text)
    assert "08:00-20:00" in error.value.hint


def test_time_is_that_of_the_devices_zone(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        noon_utc = 12 * 3600.0
        assert Hours(14 * 60, 15 * 60).now(noon_utc)
        assert not Hours(12 * 60, 13 * 60).now(noon_utc)
    finally:
        monkeypatch.undo()
        time.tzset()
