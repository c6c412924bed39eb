"""Frozen dataclasses to JSON documents and named arrays, and back, checked against their type hints.

    int, float, str, bool, None     as in JSON; a float is finite
    bytes                           lower-case hex
    Enum                            the member's value
    Literal                         the value
    X | None                        null or X
    tuple[X, ...], sequences        a list
    tuple[X, Y]                     a list of that length
    sets                            a list in ascending order
    mappings with str keys          an object
    other mappings                  a list of [key, value]
    dataclass                       an object with exactly its fields, unless another version may have written it
    Any                             JSON as it is
    Annotated[Any, Array(...)]      the array's name; the arrays travel beside the document

A name is the field's path: in the state ``State(slots=(ClusterModel(offset=v),))`` the array ``v`` is ``slots.0.offset``. An
array that occurs twice is stored once.

Decoding is strict: an unknown or missing field, a value of another type, a number that is not finite, and an array that
nothing refers to each give a `DocumentError` with the path.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from shoal.errors import DocumentError
from shoal.hints import field_hints, is_enum, optional_of
from shoal.types import Array

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded state.

    Attributes:
        document: ready for `json.dumps`.
        arrays: by the names that the document refers to.
    """

    document: Any
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def encode_state(value: Any) -> Encoded:
    """Return a dataclass instance as a document and arrays.

    Args:
        value: the instance.

    Raises:
        DocumentError: a field holds something else than its hint says.
    """
    walk = _Walk()
    document = _coder(type(value)).write(walk, value)
    return Encoded(document, walk.arrays)


def decode_state(
    cls: type[T], document: Any, arrays: Mapping[str, NDArray[Any]] | None = None, *, mixed: bool = False
) -> T:
    """Return the instance of ``cls`` that `encode_state` has encoded.

    Args:
        cls: a dataclass.
        document: as parsed by `json` or `tomllib`.
        arrays: all that the document refers to, and no others.
        mixed: whether another version of this software may have written the document: fields that it adds are skipped, and
            fields that it lacks take their default.

    Raises:
        DocumentError: the document or the arrays do not describe a ``cls``.
    """
    walk = _Walk(dict(arrays or {}), mixed=mixed)
    value: T = _coder(cls).read(walk, document)
    if unused := walk.arrays.keys() - walk.used:
        raise DocumentError(f"nothing refers to the array {min(unused)!r}")
    return value


class _Walk:
    """One encoding or decoding: where it is, and the arrays met so far."""

    __slots__ = ("arrays", "mixed", "names", "path", "used")

    def __init__(self, arrays: dict[str, NDArray[Any]] | None = None, *, mixed: bool = False) -> None:
        self.mixed = mixed
        self.path: list[Any] = []
        self.arrays: dict[str, NDArray[Any]] = {} if arrays is None else arrays
        self.names: dict[int, str] = {}
        self.used: set[str] = set()

    @property
    def place(self) -> str:
        return ".".join(map(str, self.path))

    def wrong(self, wanted: str, value: Any) -> DocumentError:
        return DocumentError(f"{self.place or 'the document'} must be {wanted}, not {str(value)[:80]!r}")


@dataclass(frozen=True, slots=True)
class _Coder:
    write: Callable[[_Walk, Any], Any]
    read: Callable[[_Walk, Any], Any]


def _coder(hint: Any) -> _Coder:
    coder = _CODERS.get(hint)
    if coder is None:
        coder = _CODERS[hint] = _make_coder(hint)
    return coder


def _make_coder(hint: Any) -> _Coder:
    origin, args = get_origin(hint), get_args(hint)
    inner = optional_of(hint)
    if inner is not None:
        return _optional(_coder(inner))
    if origin is Annotated:
        return _array(args[1].dtype) if isinstance(args[1], Array) else _coder(args[0])
    if origin is Literal:
        return _choice({value: value for value in args})
    if is_enum(hint):
        return _choice({member.value: member for member in hint})
    if dataclasses.is_dataclass(hint):
        return _record(cast(type[Any], hint))
    if origin is tuple and args[1:] != (...,):
        return _fixed(tuple(_coder(a) for a in args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(origin, _coder(args[0]), _coder(args[1]), named=args[0] is str)
    if isinstance(origin, type) and issubclass(origin, AbstractSet):
        return _items(origin, _coder(args[0]), frozenset if inspect.isabstract(origin) else origin)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _items(origin, _coder(args[0]), tuple if inspect.isabstract(origin) else origin)
    raise TypeError(f"a state can't hold {hint}")


def _same(check: Callable[[_Walk, Any], Any]) -> _Coder:
    return _Coder(check, check)


def _integer(walk: _Walk, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise walk.wrong("an integer", value)
    return int(value)


def _number(walk: _Walk, value: Any) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond the largest float
        pass
    raise walk.wrong("a finite number", value)


def _text(walk: _Walk, value: Any) -> str:
    if type(value) is not str:
        raise walk.wrong("a string", value)
    return value


def _truth(walk: _Walk, value: Any) -> bool:
    if type(value) is not bool:
        raise walk.wrong("true or false", value)
    return value


def _write_bytes(walk: _Walk, value: Any) -> str:
    if type(value) is not bytes:
        raise walk.wrong("bytes", value)
    return value.hex()


def _read_bytes(walk: _Walk, value: Any) -> bytes:
    try:
        data = bytes.fromhex(value)
    except (TypeError, ValueError):
        data = None
    # fromhex also accepts upper case and spaces, and one value must have one encoding.
    if data is None or data.hex() != value:
        raise walk.wrong("lower-case hex", value)
    return data


def _json(walk: _Walk, value: Any) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(walk, value)
    if isinstance(value, Mapping):
        return {_text(walk, key): _within(walk, key, _json, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_within(walk, i, _json, item) for i, item in enumerate(value)]
    raise walk.wrong("JSON", value)


_CODERS: dict[Any, _Coder] = {
    int: _same(_integer),
    float: _same(_number),
    str: _same(_text),
    bool: _same(_truth),
    bytes: _Coder(_write_bytes, _read_bytes),
    Any: _same(_json),
}


def _within(walk: _Walk, step: Any, convert: Callable[[_Walk, Any], Any], value: Any) -> Any:
    """Convert the part ``step`` of what the walk is at; after an error the path still names the part."""
    walk.path.append(step)
    converted = convert(walk, value)
    walk.path.pop()
    return converted


def _choice(values: Mapping[Any, Any]) -> _Coder:
    """Code the values of an enumeration or a Literal: encoded -> decoded."""
    wanted = f"one of {', '.join(map(str, values))}"

    def converter(table: Mapping[Any, Any]) -> Callable[[_Walk, Any], Any]:
        kinds = {type(value) for value in table}

        def convert(walk: _Walk, value: Any) -> Any:
            if type(value) not in kinds or value not in table:  # the type too: True equals 1
                raise walk.wrong(wanted, value)
            return table[value]

        return convert

    return _Coder(converter({decoded: value for value, decoded in values.items()}), converter(values))


def _optional(inner: _Coder) -> _Coder:
    return _Coder(
        lambda walk, value: None if value is None else inner.write(walk, value),
        lambda walk, value: None if value is None else inner.read(walk, value),
    )


def _array(dtype: str) -> _Coder:
    from numpy import ndarray  # enrolment and status use this module too and must not load numpy

    def check(walk: _Walk, value: Any) -> Any:
        if not isinstance(value, ndarray) or value.dtype != dtype:
            raise walk.wrong(f"an array of {dtype}", getattr(value, "dtype", value))
        return value

    def write(walk: _Walk, value: Any) -> str:
        # The state holds the array, so that its id stays its own during the walk.
        name = walk.names.setdefault(id(check(walk, value)), walk.place)
        if walk.arrays.setdefault(name, value) is not value:
            raise walk.wrong("a path of its own", name)
        return name

    def read(walk: _Walk, name: Any) -> Any:
        if type(name) is not str or name not in walk.arrays:
            raise walk.wrong("the name of an array", name)
        walk.used.add(name)
        return check(walk, walk.arrays[name])

    return _Coder(write, read)


def _record(cls: type[Any]) -> _Coder:
    coders = {name: _coder(hint) for name, hint in field_hints(cls).items()}
    missing = dataclasses.MISSING
    optional = {f.name for f in dataclasses.fields(cls) if not (f.default is missing and f.default_factory is missing)}

    def write(walk: _Walk, value: Any) -> Any:
        if type(value) is not cls:
            raise walk.wrong(f"a {cls.__name__}", value)
        return {name: _within(walk, name, coder.write, getattr(value, name)) for name, coder in coders.items()}

    def read(walk: _Walk, value: Any) -> Any:
        if not isinstance(value, dict):
            raise walk.wrong("a table", value)
        added, lacking = value.keys() - coders.keys(), coders.keys() - value.keys()
        if walk.mixed:
            added, lacking = set(), lacking - optional
        for wrong, word in ((added, "unknown key"), (lacking, "lacks")):
            if wrong:
                walk.path.append(min(map(str, wrong)))
                raise DocumentError(f"{word} {walk.place[:160]!r}")
        fields = {name: _within(walk, name, coder.read, value[name]) for name, coder in coders.items() if name in value}
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise walk.wrong(f"a {cls.__name__}", error) from error

    return _Coder(write, read)


def _fixed(parts: tuple[_Coder, ...]) -> _Coder:
    def write(walk: _Walk, value: Any) -> list[Any]:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise walk.wrong(f"a tuple of {len(parts)}", value)
        return [_within(walk, i, p.write, v) for i, (p, v) in enumerate(zip(parts, value, strict=True))]

    def read(walk: _Walk, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(parts):
            raise walk.wrong(f"a list of {len(parts)}", value)
        return tuple(_within(walk, i, p.read, v) for i, (p, v) in enumerate(zip(parts, value, strict=True)))

    return _Coder(write, read)


def _items(kind: type[Any], item: _Coder, make: Callable[[Any], Any]) -> _Coder:
    ordered = not issubclass(kind, AbstractSet)

    def write(walk: _Walk, value: Any) -> list[Any]:
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            raise walk.wrong(f"a {kind.__name__}", value)
        encoded = [_within(walk, i, item.write, v) for i, v in enumerate(value)]
        # A set has no order: sorted, equal sets have equal documents.
        return encoded if ordered else sorted(encoded)

    def read(walk: _Walk, value: Any) -> Any:
        if not isinstance(value, list):
            raise walk.wrong("a list", value)
        decoded = make([_within(walk, i, item.read, v) for i, v in enumerate(value)])
        if len(decoded) != len(value):
            raise walk.wrong("a list without repetitions", value)
        return decoded

    return _Coder(write, read)


def _mapping(kind: type[Any], key: _Coder, item: _Coder, *, named: bool) -> _Coder:
    """Code a mapping; ``named``: its keys are strings."""
    make: Callable[[Any], Any] = dict if inspect.isabstract(kind) else kind

    def write(walk: _Walk, value: Any) -> Any:
        if not isinstance(value, kind):
            raise walk.wrong(f"a {kind.__name__}", value)
        pairs = [(key.write(walk, k), _within(walk, k, item.write, v)) for k, v in value.items()]
        return dict(pairs) if named else [list(pair) for pair in pairs]

    def pair_of(walk: _Walk, pair: Any) -> tuple[Any, Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise walk.wrong("a key and a value", pair)
        name = key.read(walk, pair[0])
        return name, _within(walk, name, item.read, pair[1])

    def read(walk: _Walk, value: Any) -> Any:
        if not isinstance(value, dict if named else list):
            raise walk.wrong("a table" if named else "a list of pairs", value)
        items: Any = map(list, value.items()) if isinstance(value, dict) else value
        pairs = [pair_of(walk, pair) for pair in items]
        decoded = make(pairs)
        if len(decoded) != len(pairs):
            raise walk.wrong("a list of pairs with different keys", value)
        return decoded

    return _Coder(write, read)
