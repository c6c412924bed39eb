"""Trace one update of a loopback fleet, from its training to the next model.

Run it as ``python -m docs.trace_update``; ``--names`` lists the functions and types. docs/architecture.md has the figures.

Example of what it prints: ``775 functions, 147 types``.
"""

import sys
import tempfile
from pathlib import Path

from tests.helpers.fleets import make_fleet

PACKAGES = ("aggregator", "crypto", "edge_client", "shoal")
TEST_BED = ("shoal.simulation",)
FIRST, LAST = ("edge_client.learning.update", "carry_out"), ("edge_client.run.held_models", "HeldModels.thetas")
MOST_ITEMS = 8


class Trace:
    """The project's functions that were entered, and its types that were passed to or returned by them.

    It begins with the first call of FIRST and ends when LAST returns.
    """

    def __init__(self):
        self.functions, self.types = set(), set()
        self._on = self._over = False

    def follow(self, frame, event, value):
        """Take an event of `sys.setprofile`."""
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if self._over or event not in ("call", "return") or not ours(module):
            return
        if name.endswith(">") or "__create_fn__" in name:
            return  # expressions, and what dataclasses makes
        self._on = self._on or (module, name) == FIRST
        if not self._on:
            return
        self.functions.add(f"{module}.{name}")
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        given = [frame.f_locals.get(arg) for arg in code.co_varnames[:count] if arg not in ("self", "cls")]
        for one in given if event == "call" else [value]:
            self.types.update(types_of(one))
        self._over = event == "return" and (module, name) == LAST


def ours(module):
    """Return whether a module is the project's, and no part of the test bed."""
    return module.split(".")[0] in PACKAGES and not module.startswith(TEST_BED)


def types_of(value):
    """Yield the project's types of a value, and of the first items of a collection."""
    items = [value]
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        items += list(value)
    for item in items[:MOST_ITEMS]:
        if not isinstance(item, type) and ours(type(item).__module__):
            yield f"{type(item).__module__}.{type(item).__qualname__}"


def traced():
    """Return the trace of an update in a fleet of three devices."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, make_fleet(Path(folder), rounds=2) as fleet:
        sys.setprofile(trace.follow)
        try:
            fleet.run(100)
        finally:
            sys.setprofile(None)
    return trace


if __name__ == "__main__":
    found = traced()
    names = [*sorted(found.functions), *sorted(found.types)] if "--names" in sys.argv else []
    counts = f"{len(found.functions)} functions, {len(found.types)} types"
    sys.stdout.writelines(f"{line}\n" for line in (*names, counts))
