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
def compiled():
    """Return a function (name, changed options) -> (source, bundle)."""
    from shoal.owner.task_compiler.builtin import build
    from shoal.owner.task_compiler.compile import compile_task

    @functools.cache
    def make(name, **options):
        source = build(name, **SMALL[name] | options)
        bundle = compile_task(
            source.model, source.loss, source.example, name=name, kind=source.kind, hyper=source.hyper
        )
        return source, bundle

    return make
