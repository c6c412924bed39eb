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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"threads": threads}, f"^threads must be at least 1, not {threads}$") for threads in (0, -3)),
        *(
            ({"executor": name}, f"executor is auto, onnxruntime or numpy, not '{name}'")
            for name in ("xauto", "xonnxruntime", "xnumpy")
        ),
        *(
            ({"personal": text}, "personal is on, off, or a weight above 0 and up to 1e\\+06")
            for text in ("", "maybe", "0", "-1", "nan", "inf", "2e6")
        ),
        *(
            ({"max_kbps": rate}, "max_kbps is 0, for no limit, or from 8 to 1e\\+06")
            for rate in (7.9, -1.0, 2e6, float("nan"))
        ),
        ({"metered": "22-06"}, "metered is two different times of day"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 1),
        ("executor", "auto"),
        ("executor", "onnxruntime"),
        ("executor", "numpy"),
        ("max_kbps", 8.0),
        ("metered", "22:00-06:00"),
    ],
)
def test_settings_at_their_bounds_are_taken(name, value):
    assert getattr(config(**{name: value}), name) == value


def test_default_is_the_grants_broker():
    """By default a device stays and takes the grants broker; an address is not shown since it may hold a password."""
    made = config()
    assert (made.broker, made.threads, made.once, made.log) == ("", 1, False, "info")
    assert "s3cret" not in repr(config(broker="mqtts://dev-1:s3cret@broker"))


@pytest.mark.parametrize(("text", "weight"), [("on", 0.0), ("off", 0.0), ("0.5", 0.5), ("1e6", 1e6)])
def test_personal_finish_is_on_off_or_weight(text, weight):
    made = config(personal=text)
    assert ditto_weight(made.personal) == weight
    assert made.finishes == (text != "off")


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


@pytest.mark.parametrize(
    "text", ["8:00-20:00", "24:00-01:00", "08:60-09:00", "08:00", "08:00-08:00", "day", "08:00-20:00 "]
)
def test_other_texts_show_an_example(text):
    """No text means no hours; other texts are refused with an example."""
    assert parse_hours("") is None
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
