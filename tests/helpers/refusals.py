"""Errors with their hints."""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind, match=None, *, hint="", hint_is=None):
    """Expect an error as `pytest.raises` does, whose hint contains ``hint``, or is ``hint_is``."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert hint in caught.value.hint, f"{hint!r} is not in the hint {caught.value.hint!r}"
    assert hint_is in (None, caught.value.hint), f"the hint is {caught.value.hint!r}, not {hint_is!r}"
