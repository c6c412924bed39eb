"""Compiled built-in tasks, small, made once a session: compiling takes seconds."""

from __future__ import annotations

import functools

import pytest

SMALL = {
    "linear": {"inputs": 6},
    "logistic": {"inputs": 8, "classes": 3},
    "mlp": {"inputs": 8, "hidden": 6, "classes": 4},
    "cnn": {"channels": 2, "side": 9, "filters1": 3, "filters2": 4, "hidden": 6, "classes": 4, "kernel": 3},
    "lstm": {"vocabulary": 11, "embedding": 4, "hidden": 5, "layers": 1, "length": 2},
}


@pytest.fixture(scope="session")
def compiled(compile_once):
    """Return a function (name, changed options) -> (source, bundle)."""
    from shoal.owner.task_compiler.builtin import build

    @functools.cache
    def make(name, **options):
        source = build(name, **SMALL[name] | options)
        return source, compile_once(*source[:3], name=name, kind=source.kind, hyper=source.hyper)

    return make
