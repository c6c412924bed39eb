"""Random instances of the classes that the state codec stores, and ways to damage their documents."""

import copy
import dataclasses
import typing
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

import numpy as np
from hypothesis import strategies as st

from shoal.hints import field_hints, is_enum, optional_of
from shoal.types import Array

names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,6}", fullmatch=True)
figures = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | figures | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=3,
)
SCALARS = {
    int: st.integers(-(2**70), 2**70),
    float: figures,
    str: st.text(max_size=5),
    bool: st.booleans(),
    bytes: st.binary(max_size=4),
    Any: json_values,
}
NAN = float("nan")
NOT_ONE_OF = {
    int: ["x", 1.5, True, []],
    float: ["x", NAN, -float("inf"), True],
    str: [5, True, []],
    bool: [0, 1, "x"],
    bytes: ["xx", 5, "0"],
}


def instances(hint):
    """Return a Hypothesis strategy of the values of a type hint."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if inner := optional_of(hint):
        return st.none() | instances(inner)
    if origin is Annotated and isinstance(args[1], Array):
        floats = st.floats(width=32 if args[1].dtype == "float32" else 64)
        return st.lists(floats, min_size=1, max_size=3).map(lambda v: np.array(v, args[1].dtype))
    if origin is Literal:
        return st.sampled_from(args)
    if is_enum(hint):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: instances(h) for name, h in field_hints(hint).items()})
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(instances, args))
    if issubclass(origin, Mapping):
        return st.dictionaries(names if args[0] is str else instances(args[0]), instances(args[1]), max_size=2)
    if issubclass(origin, AbstractSet):
        return st.frozensets(instances(args[0]), max_size=3)
    return st.lists(instances(args[0]), max_size=2).map(list if origin is list else tuple)


def places(hint, document, path=()):
    """Return (path, hint) of every part of a document whose type the hint fixes."""
    if inner := optional_of(hint):
        return [] if document is None else places(inner, document, path)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    parts = []
    if hint is Any:
        return []
    if dataclasses.is_dataclass(hint):
        parts = [(name, h) for name, h in field_hints(hint).items()]
    elif origin is tuple and args[-1] is not ...:
        parts = list(enumerate(args))
    elif origin is not None and origin not in (Annotated, Literal) and issubclass(origin, Mapping):
        keyed = tuple[args[0], args[1]]
        parts = [(k, args[1]) for k in document] if args[0] is str else [(i, keyed) for i in range(len(document))]
    elif origin is not None and origin not in (Annotated, Literal):
        parts = [(i, args[0]) for i in range(len(document))]
    found = [(path, hint)]
    for step, h in parts:
        found += places(h, document[step], (*path, step))
    return found


def damaged(document, path, hint, draw):
    """Return a copy of the document that is wrong at ``path``, which held a value of ``hint``."""
    document = copy.deepcopy(document)
    if dataclasses.is_dataclass(hint) and draw(st.booleans()):
        place = document
        for step in path:
            place = place[step]
        if draw(st.booleans()):
            place["surplus"] = 1
        else:
            del place[draw(st.sampled_from(sorted(place)))]
        return document
    wrong = draw(st.sampled_from(NOT_ONE_OF.get(hint, [5.5, True, "no such name or value"])))
    if not path:
        return wrong
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = wrong
    return document


def same(a, b):
    """Whether two states are equal, vectors bit by bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
