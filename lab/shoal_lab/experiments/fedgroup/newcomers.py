"""newcomers: devices that join late, placed by CFL or FedGroup in the groups that stand, on rotated MNIST.

Founders hold images rotated by one of four angles, and the strategy first runs on them alone. Then newcomers join, equally
many of each angle, with images that no founder holds. The strategy meets them in ``plan``, like devices that enrol late, and
does not know their angle. A newcomer compares its update with the groups' directions under FedGroup (Eq. 9), and with those of
the tree's edges under CFL (Alg. 4). CFL has 20 founders; FedGroup's 80 are those of its group cold start, alpha = 20 for each of
m = 4 groups, compared by EDC, all of which train in every round.

A newcomer is placed correctly if, in the group that it joins and at that moment, its angle is the most frequent among the
founders. This is its true group only if the founders' groups are correct and remain so while newcomers join; the result
reports that. A group with a tie has no such angle, and every newcomer that joins it counts as wrong, as does one that is not
placed at the end. Neither paper counts newcomers, so there are no published figures.

``--rounds`` is the founders' number of rounds, ``--samples`` a device's total, cut 60/20/20 into training, validation and
test. CFL's recipe is that of cfl-label-permutation, with validated splits; FedGroup's step sizes, batches and pre-training
are those of fedgroup-mnist, with three epochs instead of twenty. On seeds 100 to 103 CFL's groups were complete in rounds 22
to 27, so 60 rounds are enough.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.metrics import adjusted_rand, purity
from shoal.simulation.engine.simulate import Observation, SimRound, simulate
from shoal.simulation.trainers.networks import OneHidden
from shoal.util.console import counted
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.data import datasets, splits
from shoal_lab.experiments.data.datasets import Dataset
from shoal_lab.experiments.studies.run import local_of, pretraining

TURNS: Final = 4
TRUE_GROUPS: Final = "the true groups"
MAJORITIES: Final = "the angle of most founders in the group joined"


def deal(
    data: Dataset, *, founders: int, newcomers: int, samples: int, seed: int
) -> tuple[Population, tuple[str, ...]]:
    """Return founders and newcomers with ``samples`` distinct images each, and the newcomers' names.

    Args:
        data: images (n, side, side).
        founders: number of founders, a multiple of four; they are the first devices by name.
        newcomers: number of newcomers, a multiple of four; equally many of each angle, in random order.
        samples: a device's images in total, cut 60/20/20.
        seed: seed of images and angles.

    Raises:
        UsageError: the devices can't be divided among the angles, or there are too few images.
    """
    for name, count in (("founders", founders), ("newcomers", newcomers)):
        if count < TURNS or count % TURNS:
            raise UsageError(f"{count} {name} can't be turned by {TURNS} angles in equal numbers")
    # Upright images are dealt first and rotated afterwards, so that the split does not depend on the angles.
    upright = splits.relabelled(data, "plain", devices=founders + newcomers, samples=samples, seed=seed)
    rng = np.random.default_rng([seed, 3])
    turns = np.concatenate([rng.permutation(np.arange(count) % TURNS) for count in (founders, newcomers)])

    def turned(shard: Shard, place: int) -> Shard:
        images = np.rot90(shard.x.reshape(-1, *data.x_train.shape[1:]), turns[place], axes=(1, 2))
        return Shard(np.ascontiguousarray(images).reshape(shard.x.shape), shard.y)

    population = dataclasses.replace(upright.mapped(turned), groups=tuple(int(q) for q in turns))
    return population, population.names[founders:]


class Placements:
    """Watches a run and records the placement of every newcomer.

    Args:
        turn_of: each device's angle.
        newcomers: their names.
        arrival: the first round that they can take part in.
    """

    def __init__(self, turn_of: Mapping[str, int], newcomers: Sequence[str], arrival: int) -> None:
        self._turn_of, self._arrival = turn_of, arrival
        self._newcomers = tuple(newcomers)
        self._founders = sorted(turn_of.keys() - set(newcomers))
        self._partition: frozenset[frozenset[str]] = frozenset()
        self._stood_from = 0
        self._stood = True
        self._leading: Mapping[int, int | None] = {}
        self._end: Mapping[str, int] = {}
        self._joined: dict[str, tuple[int, int, int | None]] = {}
        self.founders: dict[str, Any] = {}

    def __call__(self, seen: Observation) -> None:
        """Record one round."""
        clusters, round_ = seen.outcome.clusters, seen.plan.round
        of_founders = {d: clusters[d] for d in self._founders if d in clusters}
        partition = partition_of(of_founders)
        if round_ < self._arrival:
            if partition != self._partition:
                self._partition, self._stood_from = partition, round_
            self._describe(of_founders, round_)
        leading = leaders(of_founders, self._turn_of)
        for device in self._newcomers:
            # The first placement counts, by the founders' majority at that moment; devices may move later.
            if device in clusters and device not in self._joined:
                self._joined[device] = (round_, clusters[device], leading.get(clusters[device]))
                self._stood &= partition == self._partition
        self._leading, self._end = leading, clusters

    def _describe(self, clusters: Mapping[str, int], round_: int) -> None:
        labels, truth = list(clusters.values()), [self._turn_of[d] for d in clusters]
        ari = adjusted_rand(labels, truth) if labels else None
        self.founders = {
            "devices": len(self._founders),
            "grouped": len(labels),
            "clusters": len(self._partition),
            "sizes": sorted(map(len, self._partition), reverse=True),
            "purity": purity(labels, truth) if labels else None,
            "ari": ari,
            "true_groups": ari == 1.0 and len(labels) == len(self._founders),
            "stood_from_round": self._stood_from,
            "rounds": round_,
        }

    def report(self) -> dict[str, Any]:
        """Return the data for a result: the ``founders``' clusters before the newcomers joined, and the ``newcomers``."""
        each: list[dict[str, Any]] = []
        at_end = 0
        for device in self._newcomers:
            turn = self._turn_of[device]
            round_, cluster, group = self._joined.get(device, (None, None, None))
            entry = {"device": device, "turn": turn, "round": round_, "cluster": cluster, "group_turn": group}
            each.append({**entry, "right": group == turn})
            at_end += device in self._end and self._leading.get(self._end[device]) == turn
        against = TRUE_GROUPS if self.founders["true_groups"] and self._stood else MAJORITIES
        return {
            "newcomers": {
                "right": sum(e["right"] for e in each),
                "tries": len(each),
                "placed": len(self._joined),
                "right_at_end": at_end,
                "measured_against": against,
                "each": each,
            },
            "founders": self.founders,
        }


def partition_of(clusters: Mapping[str, int]) -> frozenset[frozenset[str]]:
    """Return the sets of devices that share a cluster."""
    members: dict[int, set[str]] = defaultdict(set)
    for device, cluster in clusters.items():
        members[cluster].add(device)
    return frozenset(map(frozenset, members.values()))


def leaders(clusters: Mapping[str, int], turn_of: Mapping[str, int]) -> dict[int, int | None]:
    """Return the angle that most devices of each cluster have; None where several angles share the lead."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for device, cluster in clusters.items():
        counts[cluster][turn_of[device]] += 1
    found: dict[int, int | None] = {}
    for cluster, count in counts.items():
        first, *others = count.most_common(2)
        found[cluster] = None if others and others[0][1] == first[1] else first[0]  # a tie has no leader
    return found


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``newcomers``."""
    values, algorithm = options.values, options.algorithm
    founders, alone = options.devices or values["founders"], options.rounds or values["founders_rounds"]
    after, count = values["placing_rounds"], values["newcomers"]
    if after < 1 or alone < 1:
        raise UsageError(f"{alone} rounds and {after} placing_rounds: newcomers need one of each at least")
    progress.stage("reading mnist")
    data = datasets.load("mnist", options.data_dir)
    samples, rounds = options.samples or 0, alone + after
    population, newcomers = deal(data, founders=founders, newcomers=count, samples=samples, seed=options.seed)
    assert population.groups is not None
    network = OneHidden(population.train[0].x.shape[1], values["hidden"], datasets.CLASSES)
    placements = Placements(dict(zip(population.names, population.groups, strict=True)), newcomers, alone + 1)

    def told(closed: SimRound) -> None:
        record = {**closed.as_dict(), "clusters": closed.clusters}
        progress.round(algorithm, closed.round, rounds, record)

    progress.stage(
        f"{algorithm}: {counted(founders, 'founder')} for {counted(alone, 'round')}, then {counted(count, 'newcomer')}"
    )
    local = local_of(values)
    sim_options = paper_options(
        rounds=rounds,
        local=local,
        pretrain=pretraining(values, local),
        seed=options.seed,
        mode=options.mask,
        evaluate_every=values["evaluate_every"],
        count="all",
        device=options.device,
        threads=options.threads,
        deferred=False,  # both algorithms compare single updates
        arrivals=dict.fromkeys(newcomers, alone + 1),
    )
    done = simulate(algorithm, options.settings, population, network, sim_options, told, watch=placements)
    last = done.history[-1]
    return study.result(
        options,
        {"network": repr(network), "coordinates": network.length, "founders": founders, "founders_rounds": alone},
        accuracy=None if done.final is None else done.final.accuracy,
        clusters=last.clusters,
        rounds=rounds,
        cpu_seconds_per_round=done.cpu_seconds_per_round,
        history=[closed.as_dict() for closed in done.history],
        purity=last.purity,
        ari=last.ari,
        extra=placements.report(),
    )
