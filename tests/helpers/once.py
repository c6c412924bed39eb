"""What one process of a test session makes for all of them."""

from __future__ import annotations

import fcntl
import hashlib
import pickle

from shoal.task.bundle import TaskBundle


class Once:
    """Makes each value once a session: the first process that asks makes it, and others wait for it and read it.

    Args:
        folder: of the values; all processes of the session have the same.
    """

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, name, make):
        """Return what ``make()`` has returned for this name; it can be pickled."""
        place = self._folder / hashlib.sha256(name.encode()).hexdigest()
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                place.with_suffix(".new").write_bytes(pickle.dumps(make()))
                place.with_suffix(".new").rename(place)
        return pickle.loads(place.read_bytes())


class Compiler:
    """Takes the arguments of `compile_task` and returns what it returns, for tests whose subject is not the compiler.

    A task is compiled once a session: importing torch's exporter and compiling take seconds each.
    """

    def __init__(self, once):
        self._once = once

    def __call__(self, model, loss, example, **options):
        def compiled():
            from shoal.owner.task_compiler.compile import compile_task

            return compile_task(model, loss, example, **options).to_bytes()

        return TaskBundle.from_bytes(self._once(_arguments(model, loss, example, options), compiled))


def _arguments(model, loss, example, options):
    """Return the arguments as text: layers, initial values of private parameters, loss, shapes of samples, options."""
    import torch

    with torch.random.fork_rng(devices=[]):
        shapes = [(tuple(each.shape), str(each.dtype)) for each in example(1)]
    private = tuple(options.get("private", ()))
    values = [value.tolist() for name, value in model.named_parameters() if name.startswith(private)]
    return repr((str(model), values, loss.__module__, loss.__qualname__, shapes, sorted(options.items())))
