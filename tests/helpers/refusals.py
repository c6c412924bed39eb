"""Errors with their hints, and directories that they leave as they were."""

from contextlib import contextmanager

import pytest

from shoal.util.files import LOCK_FILE


@contextmanager
def refused(kind, match=None, *, hint="", hint_is=None):
    """Expect an error as `pytest.raises` does, whose hint contains ``hint``, or is ``hint_is``."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert hint in caught.value.hint, f"{hint!r} is not in the hint {caught.value.hint!r}"
    assert hint_is in (None, caught.value.hint), f"the hint is {caught.value.hint!r}, not {hint_is!r}"


@contextmanager
def unchanged(directory):
    """Assert that what follows leaves the files of a directory as they are; its lock does not count."""

    def files():
        return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file() and p.name != LOCK_FILE}

    before = files()
    yield
    changed = {name for name, _ in files().items() ^ before.items()}
    assert not changed, f"changed: {sorted(changed)}"
