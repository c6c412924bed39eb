"""docs/wire-format.md says what the code does: every message, its kind and its fields, the frame, the envelopes' magics."""

from __future__ import annotations

import dataclasses
import re
import types
import typing

from crypto.seal import envelope
from edge_client import state
from fleet import directory
from tests.helpers.trees import ROOT
from wire import codec, frame, messages

PAGE = (ROOT / "docs" / "wire-format.md").read_text()
ROW = re.compile(r"^\| (\d+) \| ([A-Z]\w+) \| `([^`]*)` \|", re.MULTILINE)
PLAIN = {str: "string", bytes: "blob", float: "f64", bool: "bool"}
INTEGERS = {"<B": "u8", "<H": "u16", "<I": "u32", "<Q": "u64", "H": "u16[]", "I": "u32[]"}


def type_name(hint):
    """Return the page's name of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        mark = arguments[1]
        return f"bytes{mark.length}" if hasattr(mark, "length") else INTEGERS[mark.code]
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return f"optional {type_name(next(a for a in arguments if a is not type(None)))}"
    return PLAIN.get(hint) or hint.__name__


def registered(*modules):
    """Return {kind: (name, fields)} of the message types that the modules define."""
    found = {}
    for kind, cls in codec._BY_KIND.items():
        if cls.__module__ in {m.__name__ for m in modules}:
            hints = typing.get_type_hints(cls, include_extras=True)
            fields = ", ".join(f"{f.name}: {type_name(hints[f.name])}" for f in dataclasses.fields(cls))
            found[kind] = (cls.__name__, fields)
    return found


def test_the_page_lists_every_message_with_its_fields_in_order():
    """A field added, renamed or moved changes the format and must change the page."""
    described = {int(kind): (name, fields) for kind, name, fields in ROW.findall(PAGE)}
    assert described == registered(messages, state, directory)


def test_the_page_gives_the_frame_header_in_full():
    """Each field's name, offset and length, as struct lays them out."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    names = ["magic", "version", "kind", "flags", "round", "index", "total", "offset", "size", "id"]
    lengths = [4, 1, 1, 2, 4, 4, 4, 8, 8, 16]
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    assert [(int(o), int(n), name) for o, n, name in rows] == list(zip(offsets, lengths, names, strict=True))
    assert sum(lengths) == frame.HEADER_BYTES
    assert f"{frame.HEADER_BYTES} bytes" in PAGE


def test_the_page_lists_every_chunk_kind():
    """Kind numbers of the frame."""
    listed = dict(re.findall(r"(?<!\d)(\d) (upload|model|plan|roster|round|control|state)\b", PAGE))
    assert listed == {str(int(k)): k.name.lower() for k in frame.ChunkKind}


def test_the_page_names_every_magic():
    """The four bytes that each form begins with."""
    for magic in (codec.MAGIC, frame.MAGIC, envelope.MEMBER_MAGIC, envelope.GROUP_MAGIC):
        assert f'"{magic.decode()}"' in PAGE


def test_a_message_is_encoded_as_the_page_says():
    """The page's worked example, byte by byte."""
    example = re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL).group(1)
    pieces = [line.split("|")[0] for line in example.splitlines()]
    assert bytes.fromhex("".join(pieces)) == codec.encode(messages.Presence("farm", "dev-1", 7, True))
