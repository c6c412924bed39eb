"""The fields of dataclasses and their resolved type hints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Optional

import pytest

from shoal.hints import field_hints, is_enum, optional_of


class Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class Base:
    first: Annotated[int, "mark"]


@dataclass(frozen=True)
class Derived(Base):
    second: Colour | None = None


def test_hints_are_in_field_order():
    """Hints are resolved in field order with their annotations."""
    assert list(field_hints(Derived).items()) == [("first", Annotated[int, "mark"]), ("second", Colour | None)]


@pytest.mark.parametrize(
    ("hint", "inner"),
    [(int | None, int), (Optional[str], str), (int, None), (tuple[int, ...], None), (None, None)],  # noqa: UP045
)
def test_type_inside_an_optional_is_found(hint, inner):
    assert optional_of(hint) is inner


def test_a_union_of_several_types_is_refused():
    with pytest.raises(ValueError, match="too many values"):
        optional_of(int | str)


@pytest.mark.parametrize(("hint", "expected"), [(Colour, True), (int, False), (tuple[Colour, ...], False)])
def test_enumerations_are_recognised(hint, expected):
    assert is_enum(hint) is expected
