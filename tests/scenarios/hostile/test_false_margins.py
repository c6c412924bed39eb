"""Twelve simulated devices of which one reports false margins, losses or counts: the others are grouped as without its lies."""

import dataclasses

import pytest
from shoal_lab.experiments.wild import tables
from shoal_lab.experiments.wild.scenarios import Scenario, blocks

from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.simulate import simulate
from tests.helpers.fleets import same_partition

pytestmark = pytest.mark.torch
LIAR = 1
MOST_COUNT = 1 << 20


def told(margins=None, **false):
    def lie(upload):
        figures = margins(upload.round, upload.margins) if margins and upload.margins else upload.margins
        return dataclasses.replace(upload, margins=figures, **false)

    return lie


LIES = {
    "least": told(lambda _r, m: (-5.0,) * len(m)),
    "largest": told(lambda _r, m: (5.0,) * len(m)),
    "unlike": told(lambda _r, m: (5.0, -5.0, 5.0)[: len(m)]),
    "by turns": told(lambda r, m: (5.0 * (-1) ** r, 5.0 * (-1) ** (r // 2), 5.0 * (-1) ** r)[: len(m)]),
    "drifting": told(lambda r, m: (-0.02 * r,) * len(m)),
    "reversed": told(lambda _r, m: tuple(-figure for figure in m)),
    "counts": told(lambda _r, m: (-5.0,) * len(m), samples=MOST_COUNT, loss=-1e6),
}


def clusters_of(sizes, seed, lie):
    fleet = tables.deal(Scenario(kind="few", title="", data="digits", groups=blocks(*sizes)), seed=seed)
    options = fleet_options(
        fleet_run("cfl", {}), rounds=25, local=fleet.local, seed=seed, participation=1.0, mode="permutation"
    )
    names = fleet.population.names

    def tamper(given, _workforce):
        return [lie(upload) if upload.device == names[LIAR] else upload for upload in given]

    done = simulate("cfl", {}, fleet.population, fleet.network, options, tamper=tamper)
    return {name: int(model) for i, (name, model) in enumerate(zip(names, done.taken(), strict=True)) if i != LIAR}


@pytest.mark.parametrize(
    ("lie", "sizes", "seed"),
    [
        ("unlike", (6, 6), 0),
        ("counts", (9, 3), 0),
        *(pytest.param(n, s, k, marks=pytest.mark.long) for n in LIES for s in ((6, 6), (9, 3)) for k in range(9)),
    ],
)
def test_others_are_grouped_without_the_lie(lie, sizes, seed):
    """The others are grouped as if nobody lied."""
    honest = clusters_of(sizes, seed, told())
    assert len(set(honest.values())) == 2
    assert same_partition(clusters_of(sizes, seed, LIES[lie]), honest)
