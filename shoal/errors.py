"""Exceptions of all programs: each has a message, a hint for the user and the exit status of the program it ends."""

from __future__ import annotations

from typing import ClassVar


class ShoalError(Exception):
    """Base class of all expected failures.

    Attributes:
        hint: the next step for the user; empty if the message is enough.
        exit_code: the exit status of a program that ends with this error.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message.strip() or _description(type(self)))
        self.hint = hint


class UsageError(ShoalError):
    """The call itself is off: an argument that contradicts another, a value out of range."""

    exit_code = 2


class ConfigError(ShoalError):
    """A configuration file or a state directory has missing or invalid contents."""

    exit_code = 3


class StorageError(ConfigError):
    """The disk is full or fails: nothing to change in a file, and it may pass."""

    exit_code = 9


class NotEnrolledError(ShoalError):
    """The device or the aggregator holds no membership of a fleet yet."""

    exit_code = 4


class BrokerUnreachableError(ShoalError):
    """No MQTT broker answered at the address."""

    exit_code = 5


class UntrustedError(ShoalError):
    """A peer's message failed the check of its signature, its seal or the policy."""

    exit_code = 6


class TakenOverError(UntrustedError):
    """Another program has this one's identity, and began before it."""

    exit_code = 12


class ForkedHistoryError(UntrustedError):
    """The aggregator has shown this device another history of a run than before, or than it showed other devices."""


class IntegrityError(ShoalError):
    """Bytes are not what their digest, length or format promises."""

    exit_code = 7


class WireError(IntegrityError):
    """Bytes from the network are not a well-formed message."""


class LaterKindError(WireError):
    """A message of a kind that a later version has and that may be left unread; nothing of it was read but the kind."""


class OutOfRangeError(UsageError, WireError):
    """A choice of a run is out of its range, in a call, an option or a received plan."""


class WireVersionError(WireError):
    """A run is in a wire version that this software does not speak.

    Attributes:
        later: whether it is later than the one that the software speaks, so that this is the software to upgrade.
    """

    def __init__(self, message: str = "", *, later: bool = False) -> None:
        hint = "upgrade Shoal on this machine" if later else "upgrade the owner's program, and sign the run again"
        super().__init__(message, hint=hint)
        self.later = later


class DocumentError(IntegrityError):
    """A stored document does not describe the value that is expected."""


class MissingStateError(IntegrityError):
    """A device lacks the state of a model that a round needs; it waits for a checkpoint."""


class NoSumError(MissingStateError):
    """A mean that is no sum of its round's updates, in a run with a keeper: the state after it can't be made.

    Attributes:
        model: whose mean it is.
    """

    def __init__(self, message: str, model: int = 0) -> None:
        super().__init__(message)
        self.model = model


class MeteredError(ShoalError):
    """The round falls into the hours in which the device's link is metered."""


class ReplacedKeysError(UntrustedError):
    """A round was announced under keys that the owner has replaced; the device waits for one under the newer keys."""


class KeyMismatchError(IntegrityError):
    """A masked vector was used with another mask than the one that made it."""


class TaskError(ShoalError):
    """A model, a task bundle or a device's data can't be used."""

    exit_code = 8


class TrainerError(TaskError):
    """Own training code is missing, is another than the task names, or has failed."""


class NotReadyError(ShoalError):
    """Nothing is wrong, and what was asked for is not there yet: try again later."""

    exit_code = 11


class DataError(TaskError):
    """A data file is missing, malformed or does not fit the task."""


def printable(text: str) -> str:
    """Return a text with a question mark for each character that could control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def reason_of(error: BaseException) -> str:
    """Return the text of an error followed by that of its cause, unless it ends with that already. Neither part is empty."""
    text, cause = text_of(error), error.__cause__
    if cause is None:
        return text
    said = cause.strerror if isinstance(cause, OSError) and cause.strerror else text_of(cause)
    return text if text.endswith(said) else f"{text}: {text_of(cause)}"


def text_of(error: BaseException) -> str:
    """Return an error's text: for an OSError the system's message, for an error without a text the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error).strip() or type(error).__name__


def _description(kind: type[ShoalError]) -> str:
    """Return the first line of the docstring of an error's class, or its name."""
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")
