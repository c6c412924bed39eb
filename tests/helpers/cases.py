"""Cases of parametrised tests."""

import pytest


def with_long(cases, *kept):
    """Return the cases of a parametrised test, of which all but ``kept`` are left to `make long`."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are no cases of {cases}"
    rest = ((case if isinstance(case, tuple) else (case,)) for case in cases)
    return [
        case if case in kept else pytest.param(*values, marks=pytest.mark.long)
        for case, values in zip(cases, rest, strict=True)
    ]
