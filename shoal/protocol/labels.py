"""Labels of devices, which the owner signs in the roster as one text: ``line=3,site=berlin``.

The label ``name`` is the name under which people see the device. Values are ASCII words, so that no two that look alike differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shoal.errors import WireError
from shoal.limits import MAX_LABELS_CHARS

SHOWN: Final = "name"
"""The label with a device's shown name."""
_LABEL: Final = re.compile(r"([a-z][a-z0-9_]*)=([A-Za-z0-9]+(?:[ ._-][A-Za-z0-9]+)*)", re.ASCII)


def read_labels(text: str) -> dict[str, str]:
    """Return the labels in a text, by key.

    Raises:
        WireError: it is too long or malformed, or has a key twice or out of order.
    """
    if len(text) > MAX_LABELS_CHARS:
        raise WireError(f"labels of {len(text)} characters are over {MAX_LABELS_CHARS}")
    found = [_LABEL.fullmatch(item) for item in text.split(",")] if text else []
    labels = {match[1]: match[2] for match in found if match is not None}
    if write_labels(labels) != text:
        raise WireError(f"{text!r} is no text of labels")
    return labels


def write_labels(labels: Mapping[str, str]) -> str:
    """Return the text of labels; `read_labels` checks it."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
