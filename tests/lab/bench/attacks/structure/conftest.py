"""One quick lab for the folder."""

import pytest
from shoal_lab.bench.attacks.lab import make_lab
from shoal_lab.bench.numerics.kernels import one_thread


@pytest.fixture(scope="session")
def lab(compile_once):
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_lab.bench.attacks.lab.compile_task", compile_once)
        made = make_lab(quick=True)
        assert made.length == made.origin.size
        yield made
