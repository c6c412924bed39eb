"""Each type that a state may hold, and each way in which a document may not fit it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from shoal.errors import DocumentError, IntegrityError, TaskError
from shoal.types import Array, Float32Vector
from shoal.util.state_codec import decode_state, encode_state


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    id: int
    offset: Float32Vector | None = None

    def __post_init__(self):
        if self.id < 0:
            raise TaskError("a negative id")
        if self.id > 1000:
            raise ValueError("too large")


@dataclass(frozen=True)
class Upload:
    key: tuple[int, str]
    vector: Float32Vector


@dataclass(frozen=True)
class State:
    count: int = 3
    rate: float = 0.1
    name: str = "größe"
    on: bool = True
    raw: bytes = b"\x00\xff"
    level: Level = Level.HIGH
    colour: Colour = Colour.RED
    mode: Literal["a", "b"] = "b"
    maybe: int | None = None
    parts: tuple[Part, ...] = (Part(1), Part(2))
    pair: tuple[int, str] = (7, "x")
    by_name: Mapping[str, Part] = field(default_factory=lambda: {"p": Part(4)})
    by_id: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: {9: ("a",), 2: ()})
    members: frozenset[str] = frozenset({"b", "a"})
    detail: Mapping[str, Any] = field(default_factory=lambda: {"sizes": [1, 2], "deep": {"x": None}})
    online: PersistentSet[str] = field(default_factory=lambda: PersistentSet("xy"))
    received: PersistentMap[str, int] = field(default_factory=lambda: PersistentMap({"d": 1}))
    rows: PersistentList[int] = field(default_factory=lambda: PersistentList([3, 1]))


@dataclass(frozen=True)
class Wide:
    exact: Annotated[Any, Array("float64")]


@dataclass(frozen=True)
class Holder:
    newest: Mapping[str, Upload]
    twice: tuple[Float32Vector, ...] = ()


@dataclass(frozen=True)
class Nested:
    found: Mapping[str, Mapping[str, Float32Vector]]


DOCUMENT = json.loads(json.dumps(encode_state(State()).document))


def changed(path, value):
    """Return the document with another value at ``path``; ``...`` removes it."""
    document = json.loads(json.dumps(DOCUMENT))
    *above, last = path
    place = document
    for step in above:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


def test_every_type_comes_back_as_it_was():
    """Whole numbers stand for floats."""
    found = decode_state(State, DOCUMENT)
    assert found == State()
    kinds = [type(value) for value in (found.online, found.received, found.rows)]
    assert kinds == [PersistentSet, PersistentMap, PersistentList]
    assert list(found.by_id) == [9, 2]
    assert (DOCUMENT["raw"], DOCUMENT["by_id"]) == ("00ff", [[9, ["a"]], [2, []]])
    assert type(decode_state(State, changed(["rate"], 1)).rate) is float
    assert type(encode_state(State(rate=np.float64(1))).document["rate"]) is float


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["count"], ..., "lacks 'count'"),
        (["parts", 1, "offset"], ..., r"lacks 'parts\.1\.offset'"),
        (["extra"], 1, "unknown key 'extra'"),
        (["by_name", "p", "x"], 1, r"unknown key 'by_name\.p\.x'"),
        (["count"], True, "count must be an integer"),
        (["count"], 1.0, "count must be an integer"),
        (["rate"], float("nan"), "rate must be a finite number"),
        (["rate"], float("inf"), "rate must be a finite number"),
        (["rate"], 10**400, "rate must be a finite number"),
        (["rate"], "1", "rate must be a finite number"),
        (["name"], 1, "name must be a string"),
        (["on"], 1, "on must be true or false"),
        (["raw"], "0", "raw must be lower-case hex"),
        (["raw"], "FF", "raw must be lower-case hex"),
        (["raw"], 5, "raw must be lower-case hex"),
        (["level"], 3, "level must be one of 1, 2"),
        (["level"], True, "level must be one of"),
        (["level"], [1], "level must be one of"),
        (["colour"], "blue", "colour must be one of red"),
        (["mode"], "c", "mode must be one of a, b"),
        (["maybe"], "x", "maybe must be an integer"),
        (["parts"], {}, "parts must be a list"),
        (["parts", 0], 5, r"parts\.0 must be a table"),
        (["pair"], [7], "pair must be a list of 2"),
        (["pair", 1], 7, r"pair\.1 must be a string"),
        (["by_id"], {}, "by_id must be a list of pairs"),
        (["by_id", 0], [9], "by_id must be a key and a value"),
        (["by_id", 0, 0], "9", "by_id must be an integer"),
        (["by_id", 0, 1], [3], r"by_id\.9\.0 must be a string"),
        (["by_id", 0, 0], 2, "pairs with different keys"),
        (["members"], ["a", "a"], "members must be a list without repetitions"),
        (["detail", "deep", "x"], float("nan"), r"detail\.deep\.x must be a finite number"),
        (["received", "d"], None, r"received\.d must be an integer"),
        (["parts", 0, "id"], 2000, r"parts\.0 must be a Part, not 'too large'"),
    ],
)
def test_unfit_document_is_refused_by_path(path, value, message):
    """A document that does not fit is refused with the path."""
    with pytest.raises(IntegrityError, match=message):
        decode_state(State, changed(path, value))


@pytest.mark.parametrize(
    ("kind", "document", "error", "message"),
    [
        *((State, document, DocumentError, "the document must be a table") for document in (None, [], 5, "x")),
        (State, changed(["parts", 0, "id"], -1), TaskError, "a negative id"),
    ],
    ids=["none", "list", "number", "text", "the class's own rule"],
)
def test_other_document_is_refused(kind, document, error, message):
    """A document that is no table, or that the class refuses with its own error."""
    with pytest.raises(error, match=message):
        decode_state(kind, document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 1.5}, "count must be an integer"),
        ({"count": True}, "count must be an integer"),
        ({"rate": float("nan")}, "rate must be a finite number"),
        ({"name": b"x"}, "name must be a string"),
        ({"on": 1}, "on must be true or false"),
        ({"raw": "00"}, "raw must be bytes"),
        ({"level": 2}, "level must be one of"),
        ({"parts": [Part(1)]}, "parts must be a tuple"),
        ({"parts": (5,)}, r"parts\.0 must be a Part"),
        ({"pair": (1, "x", 2)}, "pair must be a tuple of 2"),
        ({"by_name": {3: Part(1)}}, "by_name must be a string"),
        ({"by_name": [("p", Part(1))]}, "by_name must be a Mapping"),
        ({"members": {"a"}}, "members must be a frozenset"),
        ({"detail": {"x": object()}}, r"detail\.x must be JSON"),
        ({"detail": {1: 2}}, "detail must be a string"),
        ({"online": frozenset("x")}, "online must be a PersistentSet"),
    ],
)
def test_value_breaking_its_hint(changes, message):
    """A value that breaks its hint is not encoded."""
    with pytest.raises(DocumentError, match=message):
        encode_state(State(**changes))


# ---------------------------------------------------------------------------------------------------- arrays


def vector(*values, dtype=np.float32):
    return np.array(values, dtype)


def test_arrays_are_stored_once():
    """Arrays are named by their path and stored once."""
    one, other = vector(1), vector(2)
    encoded = encode_state(Holder({"a": Upload((1, "a"), one)}, (one, other, one)))
    assert encoded.arrays == {"newest.a.vector": one, "twice.1": other}
    assert encoded.document["twice"] == ["newest.a.vector", "twice.1", "newest.a.vector"]
    found = decode_state(Holder, encoded.document, encoded.arrays)
    assert found.twice == (one, other, one)
    assert found.newest == {"a": Upload((1, "a"), one)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "exact must be the name of an array"),
        ({"exact": vector(1)}, "exact must be an array of float64, not 'float32'"),
        ({"exact": [1.0]}, "exact must be an array of float64"),
        ({"exact": vector(1, dtype=np.float64), "more": vector(1)}, "nothing refers to the array 'more'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, message):
    with pytest.raises(DocumentError, match=message):
        decode_state(Wide, {"exact": "exact"}, arrays)
    assert decode_state(Wide, {"exact": "exact"}, {"exact": vector(1, dtype=np.float64)}).exact == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Nested({"x.y": {"z": vector(1)}, "x": {"y.z": vector(2)}}), "must be a path of its own"),
        (Wide(vector(1)), "exact must be an array of float64"),
        (Wide([1.0]), "exact must be an array"),
    ],
    ids=["paths that read the same", "another dtype", "a list"],
)
def test_unfit_arrays_are_not_encoded(value, message):
    with pytest.raises(DocumentError, match=message):
        encode_state(value)


def test_impossible_hint_is_the_classs_fault():
    """A hint that no document can hold is a mistake in the class."""

    @dataclass(frozen=True)
    class Odd:
        value: complex

    with pytest.raises(TypeError, match="complex"):
        encode_state(Odd(1j))


def test_other_version_may_be_read():
    """Added fields are skipped, and lacking ones take their default, at any depth; what has no default is missed."""
    document = {"count": 4, "added": {"x": 1}}
    assert decode_state(State, document, mixed=True) == State(count=4)
    with pytest.raises(DocumentError):
        decode_state(State, document)
    with pytest.raises(DocumentError, match="lacks 'id'"):
        decode_state(Part, {"offset": None}, mixed=True)
    with pytest.raises(DocumentError, match="count must be an integer"):
        decode_state(State, {"count": "4"}, mixed=True)
