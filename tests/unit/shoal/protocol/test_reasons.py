"""Every error that a person reads has a text."""

import errno
import os

import pytest
from cryptography.exceptions import InvalidTag

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head, seal_to_group
from crypto.seal.identity import Identity
from shoal import errors
from shoal.errors import ShoalError, reason_of
from shoal.protocol.messages import Sealed


def all_kinds(kind=ShoalError):
    return [kind, *(k for sub in kind.__subclasses__() for k in all_kinds(sub))]


@pytest.mark.parametrize("kind", [k for k in all_kinds() if k.__module__ == errors.__name__])
@pytest.mark.parametrize("text", ["", " \n"])
def test_an_error_raised_without_a_text_has_its_class_description(kind, text):
    error = kind(text)
    assert len(str(error)) > 10
    assert reason_of(error) == str(error)


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        (InvalidTag(), "InvalidTag"),
        (TimeoutError(), "TimeoutError"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "f"), "Too many open files: f"),
        (ValueError("bad"), "bad"),
    ],
)
def test_a_cause_without_a_text_is_named_by_its_class(cause, shown):
    error = ShoalError("refused")
    error.__cause__ = cause
    assert reason_of(error) == f"refused: {shown}"


def test_a_message_under_another_key_is_refused_with_a_reason():
    """A revoked device logged `a sealed message was refused: ` with nothing after the colon."""
    identity = Identity.generate("aggregator")
    ours, other = (GroupKey("reef", "broadcast", bytes([i]) * 32) for i in (1, 2))
    sealed = seal_to_group(identity, ours, Sealed("reef", "announcement", "aggregator", "*"), b"plain")
    with pytest.raises(SealError) as refused:
        open_from_group(other, sealed, *read_head(sealed), identity.member.sign_key)
    assert reason_of(refused.value) == "a sealed message was refused: it was sealed under another key, or altered"


def test_a_cause_that_the_error_has_named_is_not_repeated():
    error = ShoalError("can't write birth: No space left on device")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "birth")
    assert reason_of(error) == "can't write birth: No space left on device"
