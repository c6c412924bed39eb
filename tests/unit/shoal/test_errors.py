"""Errors: exit codes, texts that are never empty, and causes that are named once."""

import errno
import os

import pytest
from cryptography.exceptions import InvalidTag

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head, seal_to_group
from crypto.seal.identity import Identity
from shoal import errors
from shoal.errors import ShoalError, reason_of, text_of
from shoal.protocol.messages import Sealed


def all_kinds(kind=ShoalError):
    return [kind, *(k for sub in kind.__subclasses__() for k in all_kinds(sub))]


@pytest.mark.parametrize("kind", [k for k in all_kinds() if k.__module__ == errors.__name__])
@pytest.mark.parametrize("text", ["", " \n"])
def test_error_without_text_has_its_class(kind, text):
    """An error raised without a text has its class description."""
    error = kind(text)
    assert len(str(error)) > 10
    assert reason_of(error) == str(error)


DENIED = "can't read x: Permission denied"


@pytest.mark.parametrize(
    ("text", "cause", "shown"),
    [
        ("refused", InvalidTag(), "refused: InvalidTag"),
        ("refused", TimeoutError(), "refused: TimeoutError"),
        ("refused", OSError(errno.EMFILE, os.strerror(errno.EMFILE), "f"), "refused: Too many open files: f"),
        ("refused", ValueError("bad"), "refused: bad"),
        (
            "can't write birth: No space left on device",
            OSError(errno.ENOSPC, "No space left on device", "birth"),
            "can't write birth: No space left on device",
        ),
        (DENIED, OSError(errno.EACCES, "Permission denied", "/srv/x"), DENIED),
        (
            DENIED,
            OSError(errno.EROFS, "Read-only file system", "/srv/x"),
            f"{DENIED}: Read-only file system: /srv/x",
        ),
    ],
)
def test_cause_is_named_once(text, cause, shown):
    """One without a text is named by its class.

    One that the error has named is not repeated; the text may end with the system's message alone, without the file.
    """
    error = ShoalError(text)
    error.__cause__ = cause
    assert reason_of(error) == shown


def test_other_key_is_refused_with_reason():
    """A revoked device logged `a sealed message was refused: ` with nothing after the colon."""
    identity = Identity.generate("aggregator")
    ours, other = (GroupKey("reef", "broadcast", bytes([i]) * 32) for i in (1, 2))
    sealed = seal_to_group(identity, ours, Sealed("reef", "announcement", "aggregator", "*"), b"plain")
    with pytest.raises(SealError) as refused:
        open_from_group(other, sealed, *read_head(sealed), identity.member.sign_key)
    assert reason_of(refused.value) == "a sealed message was refused: it was sealed under another key, or altered"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ShoalError, 1),
        (errors.UsageError, 2),
        (errors.ConfigError, 3),
        (errors.NotEnrolledError, 4),
        (errors.BrokerUnreachableError, 5),
        (errors.UntrustedError, 6),
        (errors.ForkedHistoryError, 6),
        (errors.TakenOverError, 12),
        (errors.IntegrityError, 7),
        (errors.WireError, 7),
        (errors.WireVersionError, 7),
        (errors.LaterKindError, 7),
        (errors.DocumentError, 7),
        (errors.MissingStateError, 7),
        (errors.NoSumError, 7),
        (errors.ReplacedKeysError, 6),
        (errors.KeyMismatchError, 7),
        (errors.TaskError, 8),
        (errors.TrainerError, 8),
        (errors.DataError, 8),
        (errors.StorageError, 9),
        (errors.NotReadyError, 11),
        (errors.MeteredError, 1),
        (errors.OutOfRangeError, 2),
    ],
)
def test_each_error_has_its_exit_status(kind, code):
    """Scripts and the services' units read these numbers."""
    assert kind("x").exit_code == code


def test_every_error_is_in_the_table():
    """Every error of the module is in the table above."""
    mark = next(m for m in test_each_error_has_its_exit_status.pytestmark if m.name == "parametrize")
    assert {kind for kind, _ in mark.args[1]} == {k for k in all_kinds() if k.__module__ == errors.__name__}


def test_full_disk_is_handled_everywhere():
    """Callers catch ConfigError for any file that can't be written, and only some tell the two apart."""
    assert issubclass(errors.StorageError, errors.ConfigError)
    assert not issubclass(errors.ConfigError, errors.StorageError)


def test_the_hint_is_no_part_of_the_message():
    error = errors.ConfigError("  it is off\n", hint="turn it on")
    assert (str(error), error.hint) == ("it is off", "turn it on")
    assert ShoalError("x").hint == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("  bad \n"), "bad"),
        (ValueError(), "ValueError"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.ENOENT, "No such file or directory", "a.toml"), "No such file or directory: a.toml"),
        (OSError("timed out"), "timed out"),
    ],
)
def test_text_is_never_empty(error, text):
    """The text of any exception is never empty."""
    assert text_of(error) == text
