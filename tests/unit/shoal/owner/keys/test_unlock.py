"""The owner's passphrase: from a private file or the terminal, and asked for only if the key is under one."""

import getpass
import sys
import types

import pytest

from crypto.seal import passphrase
from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, UntrustedError
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.unlock import FILE_VARIABLE, ask, open_fleet
from shoal.util.files import write_private
from tests.helpers.refusals import refused


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """No file and no terminal, and keys derived with little memory."""
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: False))
    monkeypatch.setattr(passphrase, "MEMORY_KIB", 64)
    monkeypatch.setattr(passphrase, "PASSES", 1)


@pytest.fixture
def typed(monkeypatch):
    """Sit a person at the terminal: ``typed("first", "second")``; returns the prompts that they saw."""

    def sit(*answers):
        prompts, left = [], list(answers)
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr(getpass, "getpass", lambda prompt: (prompts.append(prompt), left.pop(0))[1])
        return prompts

    return sit


def opens(lock, text):
    """Return whether ``lock`` holds the passphrase ``text``."""
    return lock.open("x", Lock(text).close("x", b"plain")) == b"plain"


def test_typed_once_to_open_twice_to_make(typed):
    """A passphrase is typed once to open and twice to make."""
    prompts = typed("correct horse")
    assert opens(ask(), b"correct horse")
    assert len(prompts) == 1
    prompts = typed("correct horse", "correct horse")
    assert opens(ask(twice=True), b"correct horse")
    assert len(prompts) == 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [(("correct horse", "correct house"), "the two passphrases differ"), (("short", "short"), "at least 8 characters")],
)
def test_unfit_entries_are_refused(typed, answers, message):
    typed(*answers)
    with pytest.raises(ConfigError, match=message):
        ask(twice=True)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["word", "link"])
def test_file_comes_before_the_terminal(tmp_path, monkeypatch, typed, end, name):
    """Its line end does not count. A link is followed: a service manager links a secret into a directory."""
    write_private(tmp_path / "word", b" correct horse " + end)
    (tmp_path / "link").symlink_to("word")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / name))
    prompts = typed()
    assert opens(ask(twice=True), b" correct horse ")
    assert prompts == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _path: None, "can't read"),
        (lambda path: write_private(path, b"short\n"), "at least 8 characters"),
        (lambda path: (write_private(path, b"correct horse"), path.chmod(0o644)), "word"),
    ],
    ids=["missing", "too short", "others can read it"],
)
def test_unfit_file_names_its_variable(tmp_path, monkeypatch, make, message):
    """A file that does not serve is named with its variable."""
    make(tmp_path / "word")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "word"))
    with pytest.raises(ConfigError, match=f"^{FILE_VARIABLE}: .*{message}") as caught:
        ask()
    assert caught.value.hint
    assert "correct horse" not in str(caught.value)


def test_hint_names_the_variable():
    """Without a file and a terminal the hint names the variable."""
    with refused(ConfigError, "there is no terminal to ask at", hint=FILE_VARIABLE):
        ask()


def test_fleet_opens_without_asking(tmp_path, typed):
    """A fleet is opened without asking unless its key is under a passphrase."""
    plain = FleetDirectory.create(tmp_path / "plain", "reef", "mqtt://h")
    locked = FleetDirectory.create(tmp_path / "locked", "reef", "mqtt://h", Lock(b"correct horse"))
    prompts = typed("correct horse", "another one")
    assert open_fleet(plain.path).fingerprint == plain.fingerprint
    assert prompts == []
    assert open_fleet(locked.path).fingerprint == locked.fingerprint
    with pytest.raises(UntrustedError, match="passphrase is wrong"):
        open_fleet(locked.path)
