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


def test_each_layer_beats_the_one_below(tmp_path):
    """A false flag is a flag; defaults hold where nothing is said."""
    text = '[edge]\nbroker = "file"\nretries = 1\npace = 2\nonce = true\nca = "/etc/ca.pem"\n'
    environment = {"SHOAL_EDGE_BROKER": "env", "SHOAL_EDGE_RETRIES": "2", "UNRELATED": "x"}
    layers = read(tmp_path, text, environment, broker="flag", once=False)
    assert layers.config() == Options(Path("d"), "flag", 2, 2.0, False, Path("/etc/ca.pem"))
    file = str(tmp_path / "shoal.toml")
    assert layers.origins == {
        **dict.fromkeys(("dir", "broker", "once"), "flag"),
        **dict.fromkeys(("pace", "ca"), file),
        "retries": "SHOAL_EDGE_RETRIES",
    }
    bare = read(tmp_path)
    assert bare.config() == Options(Path("d"))
    assert bare.origins == {"dir": "flag", **dict.fromkeys(("broker", "retries", "pace", "once", "ca"), "default")}


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


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"[edge]\nbrokr = 'x'\n", "unknown key 'brokr'"),
        (b"[edgy]\n", "unknown table or key 'edgy'"),
        (b"broker = 'x'\n", "unknown table or key 'broker'"),
        (b"edge = 3\n", "not a table"),
        (b"[edge]\nretries = 'many'\n", "retries is a whole number, not 'many'"),
        (b"[edge]\nretries = true\n", "retries is a whole number, not True"),
        (b"[edge]\nbroker = 3\n", "broker is text, not 3"),
        (b"[edge]\nonce = 1\n", "once is true or false, not 1"),
        (b"[edge]\nca = 1\n", "ca is a path, not 1"),
        (b"\xff", "is not valid TOML"),
        (b"[edge", "is not valid TOML"),
        (b"x = " + b"[" * 10**5, "is not valid TOML"),
        (b"[edge]\ndir = 1979-13-99", "is not valid TOML"),
        (None, "can't read"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, data, match):
    file = tmp_path / "shoal.toml"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError, match=match):
        read_layers(Options, file=file, flags={"dir": Path("d")}, environment={})


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


PROXY = "http://us:hunter2@proxy:3128"


def test_a_proxy_is_shown_without_password():
    found = read_layers(EdgeConfig, environment={"SHOAL_EDGE_PROXY": PROXY}).document()["proxy"]
    assert found == {"value": "http://proxy:3128", "source": "SHOAL_EDGE_PROXY"}
