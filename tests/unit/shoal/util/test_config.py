"""Layered configuration: flag, environment, file, default; unknown keys are refused."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import pytest

from edge_client.config import EdgeConfig
from shoal.errors import ConfigError
from shoal.util.config import Setting
from shoal.util.config import read as read_layers
from tests.helpers.refusals import refused

SAID = Setting("Its meaning.")


@dataclass(frozen=True, slots=True)
class Options:
    TABLE: ClassVar = "edge"

    dir: Annotated[Path, SAID]
    broker: Annotated[str, SAID] = field(default="mqtt://localhost", repr=False)
    retries: Annotated[int, SAID] = 3
    pace: Annotated[float, SAID] = 0.5
    once: Annotated[bool, SAID] = False
    ca: Annotated[Path | None, SAID] = None


def read(tmp_path, text=None, environment=None, **flags):
    file = None
    if text is not None:
        file = tmp_path / "shoal.toml"
        file.write_text(text)
    return read_layers(Options, file=file, flags={"dir": Path("d"), **flags}, environment=environment or {})


def test_defaults_hold_where_nothing_is_said(tmp_path):
    layers = read(tmp_path)
    assert layers.config() == Options(Path("d"))
    assert layers.origins == {
        "dir": "flag",
        **dict.fromkeys(("broker", "retries", "pace", "once", "ca"), "default"),
    }


def test_each_layer_beats_the_one_below(tmp_path):
    text = '[edge]\nbroker = "file"\nretries = 1\npace = 0.1\n'
    environment = {"SHOAL_EDGE_BROKER": "env", "SHOAL_EDGE_RETRIES": "2", "UNRELATED": "x"}
    layers = read(tmp_path, text, environment, broker="flag")
    assert (layers.config().broker, layers.config().retries, layers.config().pace) == ("flag", 2, 0.1)
    assert layers.origins["broker"] == "flag"
    assert layers.origins["retries"] == "SHOAL_EDGE_RETRIES"
    assert layers.origins["pace"] == str(tmp_path / "shoal.toml")


def test_credential_gives_secret_texts(tmp_path):
    """Below the environment, above the file. Other keys are not secrets, and are not looked for."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    for name, text in (("broker", "mqtt://a:b@host\n"), ("ca", "PEM"), ("retries", "9")):
        (folder / name).write_text(text)
    environment = {"CREDENTIALS_DIRECTORY": str(folder)}
    layers = read(tmp_path, '[edge]\nbroker = "file"\n', environment)
    assert (layers.config().broker, layers.config().ca, layers.config().retries) == (
        "mqtt://a:b@host",
        folder / "ca",
        3,
    )
    assert (layers.origins["broker"], layers.origins["ca"]) == ("credential broker", "credential ca")
    assert read(tmp_path, environment={**environment, "SHOAL_EDGE_BROKER": "env"}).config().broker == "env"


@pytest.mark.parametrize(
    ("word", "value"), [("1", True), ("true", True), ("YES", True), ("0", False), ("False", False), ("no", False)]
)
def test_truth_in_the_environment(tmp_path, word, value):
    assert read(tmp_path, environment={"SHOAL_EDGE_ONCE": word}).config().once is value


def test_a_false_flag_is_a_flag(tmp_path):
    layers = read(tmp_path, "[edge]\nonce = true\n", once=False)
    assert layers.config().once is False
    assert layers.origins["once"] == "flag"


def test_optional_paths_and_numbers(tmp_path):
    """Optional paths and whole numbers for real ones."""
    layers = read(tmp_path, '[edge]\nca = "/etc/ca.pem"\npace = 2\n')
    assert layers.config().ca == Path("/etc/ca.pem")
    assert layers.config().pace == 2.0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[edge]\nbrokr = 'x'\n", "unknown key 'brokr'"),
        ("[edgy]\n", "unknown table or key 'edgy'"),
        ("broker = 'x'\n", "unknown table or key 'broker'"),
        ("edge = 3\n", "not a table"),
        ("[edge\n", "not valid TOML"),
        ("[edge]\nretries = 'many'\n", "retries is a whole number, not 'many'"),
        ("[edge]\nretries = true\n", "retries is a whole number, not True"),
        ("[edge]\nbroker = 3\n", "broker is text, not 3"),
        ("[edge]\nonce = 1\n", "once is true or false, not 1"),
        ("[edge]\nca = 1\n", "ca is a path, not 1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, match):
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, text)


@pytest.mark.parametrize(("name", "value"), [("RETRIES", "x"), ("ONCE", "maybe"), ("PACE", "fast")])
def test_a_wrong_variable_is_named(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"SHOAL_EDGE_{name} is .*, not '{value}'"):
        read(tmp_path, environment={f"SHOAL_EDGE_{name}": value})


def test_value_that_nobody_gave_says_how_to(tmp_path):
    with refused(
        ConfigError,
        "dir is not set",
        hint_is="give it on the command line, as SHOAL_EDGE_DIR, or as dir in [edge] of a TOML file",
    ):
        read_layers(Options, environment={}).config()


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        read_layers(Options, file=tmp_path / "none.toml", environment={})


@pytest.mark.parametrize("junk", [b"\xff", b"[edge", b"x = " + b"[" * 10**5, b"[edge]\ndir = 1979-13-99"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, junk):
    file = tmp_path / "shoal.toml"
    file.write_bytes(junk)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_layers(Options, file=file, environment={})


PROXY = "http://us:hunter2@proxy:3128"


def test_a_proxy_is_shown_without_password():
    found = read_layers(EdgeConfig, environment={"SHOAL_EDGE_PROXY": PROXY}).document()["proxy"]
    assert found == {"value": "http://proxy:3128", "source": "SHOAL_EDGE_PROXY"}
