"""Simulated devices that carry out a round plan, as `edge_client.learning.update.carry_out` does on a real device.

Score the candidates, take the best, train it, mask the update. Devices are trained in blocks. If a strategy needs means only,
updates are summed as they are computed, and single updates never exist: `Workforce.average` then returns the mean of the
contributions that it is given, masked once, since a mask commutes with sums.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.strategies.base import ClientUpdate, Reads, RoundPlan, mean_update, norm_of, weights_of
from aggregator.strategies.registry import plan_settings
from aggregator.strategies.statistics import STATISTICS_ASSIGNMENT
from crypto.mask.masking import mask
from edge_client.learning.scoring import nearest_direction, nearest_model
from edge_client.learning.statistics import scale_from, statistics_of
from edge_client.learning.update import LOSS_DECIMALS, NORM_DECIMALS, BatchOrder, reported_margins, trial_margins
from edge_client.storage.scales import Scale
from shoal.errors import DataError, IntegrityError
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import FOR_ALL, STATISTICS_MODEL, Assignment, Phase, Share, statistics_model
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population
from shoal.simulation.engine.exchange import exchange
from shoal.simulation.engine.models import Models
from shoal.simulation.engine.private import PrivateParts, PrivateRows, PrivateStart
from shoal.simulation.engine.ranks import current_ranks
from shoal.simulation.trainers import scoring
from shoal.simulation.trainers.blocks import Block, DivergedError, Shelf, Trained, Trainer, without_diverged
from shoal.simulation.trainers.dual import Dual, Scored
from shoal.simulation.trainers.networks import Network
from shoal.simulation.trainers.registry import make_trainer
from shoal.task.data_declaration import DataDeclaration
from shoal.types import Float32Vector

ROWS_BYTES: Final = 64 << 20
"""Most memory of a round's single updates where their weights are not known in advance; larger ones are summed nevertheless."""

Group = tuple[Assignment, NDArray[np.int64], NDArray[np.int64]]
"""Devices with equal orders: the order, their places (c,), and the candidates as rows of the models: (c, 1), or (1, k)."""


@dataclass(slots=True)
class _Sum:
    """The sum of clear updates that were trained from one model in one phase, and the names of their devices."""

    uniform: Tensor
    samples: Tensor | None
    devices: set[str] = dataclasses.field(default_factory=set)


@dataclass(slots=True)
class _Round:
    """The round that was carried out last, with its sums."""

    plan: RoundPlan
    models: Tensor
    row_of: Mapping[int, int]
    sums: dict[tuple[int, int], _Sum] = dataclasses.field(default_factory=dict)


class Workforce:
    """All devices of a population.

    Args:
        population: the devices' data.
        network: the network that they train.
        run: the run plan, with recipes, seed, algorithm and segments.
        origins: shape (run.origins, d), float32.
        trainer: one of `trainers.registry.TRAINERS`, or "auto" for the one that the rule there picks.
        device: torch's name of the device that computes.
        norms: also compute single updates' norms when updates are summed, though the strategy reads only means.
        deferred: sum updates as they come instead of storing each; None does so if the strategy needs only means whose weights
            are known before and no one watches, or if single updates would take more than ROWS_BYTES.
        reads: the parts of updates that the strategy reads; None asks its settings.
        watched: whether others look at the rounds, so that single updates should be stored if there is room for them.
        private: the network's private coordinates; None if all are federated. Each update is stored then.
        declared: the data's bounds, if each model takes samples in the scale of its devices' statistics; None if all take them
            as they are.

    Attributes:
        private: the devices' private values; None if all coordinates are federated.
        ranks: the processes that train the devices together.
        diverged: names of the devices whose training diverged in the round that was carried out last.
    """

    def __init__(
        self,
        population: Population,
        network: Network,
        run: RunPlan,
        origins: NDArray[np.float32],
        *,
        trainer: str = "auto",
        device: str = "cpu",
        deferred: bool | None = None,
        norms: bool = False,
        reads: Reads | None = None,
        watched: bool = False,
        private: PrivateStart | None = None,
        declared: DataDeclaration | None = None,
    ) -> None:
        federated = network.length - (0 if private is None else len(private.places))
        if origins.shape != (run.origins, federated) or run.length != federated:
            raise DataError(f"origins of shape {origins.shape} for {run.origins} models of {federated} coordinates")
        self.network, self.run = network, run
        self.models = Models(run, np.ascontiguousarray(origins, np.float32))
        self.ranks = current_ranks()
        self.device = torch.device(self.ranks.device(device))
        self.deferred = deferred if private is None else False
        self.private = None
        if private is not None:
            self.private = PrivateParts(private, network.length, len(population), self.device)
        self.reads = plan_settings(run).reads if reads is None else reads
        self.norms = norms or self.reads != "means"
        self._watched = watched
        self._trainer_name = trainer
        self._current: _Round | None = None
        self.diverged: set[str] = set()
        self._sound: set[str] = set()
        self.declared = declared
        self.use_data(population)

    @property
    def _round(self) -> _Round:
        assert self._current is not None, "a round is carried out first"
        return self._current

    def use_data(self, population: Population) -> None:
        """Train and test on ``population`` from now on: the same devices, whose data may have changed."""
        self.population = population
        self.place_of = {name: i for i, name in enumerate(population.names)}
        self._scale: Scale | None = None
        self._shelves: dict[Scale | None, dict[Share, Shelf]] = {}
        self._trainers: dict[Scale | None, Trainer] = {}
        self._probes: Shelf | None = None
        self.samples = np.minimum(population.samples, self.run.recipe.max_samples)
        self._equal = bool((self.samples == self.samples[0]).all())

    def shelf(self, share: Share | int) -> Shelf:
        """Return one share of all devices' data, in the scale that is in use."""
        share, shelves = Share(share), self._shelves.setdefault(self._scale, {})
        if share not in shelves:
            shards = {
                Share.TRAIN: self.population.train,
                Share.VALIDATION: self.population.validation,
                Share.TEST: self.population.test,
            }[share]
            shelves[share] = Shelf([shard.scaled(self._scale) for shard in shards], self.device)
        return shelves[share]

    @property
    def trainer(self) -> Trainer:
        """The trainer for the devices' training samples in the scale that is in use, of which it keeps the kernels."""
        if self._scale not in self._trainers:
            self._trainers[self._scale] = make_trainer(self._trainer_name, self.network, self.shelf(Share.TRAIN))
        return self._trainers[self._scale]

    def scale_of(self, plan: RoundPlan, model: int) -> Scale | None:
        """Return the scale in which a model of ``plan`` takes samples; None if it takes them as they are."""
        if self.declared is None:
            return None
        own = statistics_model(model) in plan.models
        mean = self.theta(plan, statistics_model(model) if own else STATISTICS_MODEL)
        return scale_from(mean, self.declared, self.run.run_id, of_cluster=own) if mean.any() else None

    def use_scale(self, plan: RoundPlan, model: int) -> None:
        """Train and score in the scale of a model of ``plan`` from now on."""
        self._scale = self.scale_of(plan, model)

    def losses(
        self, plan: RoundPlan, ids: Sequence[int], models: Tensor, share: Share | int, places: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the losses of models (k, d) of ``plan``, each in its scale, on a share of the devices at ``places``: (c, k)."""
        if self.declared is None:
            return self.score_together(models, self.samples_of(share, places), places).losses
        found = []
        for at, model in enumerate(ids):
            self.use_scale(plan, model)
            found.append(self.score(models[at : at + 1], share, places).losses)
        return np.concatenate(found, axis=1)

    @property
    def probes(self) -> Shelf:
        """Return the test shards that belong to no device."""
        if self._probes is None:
            self._probes = Shelf(self.population.probes, self.device)
        return self._probes

    def theta(self, plan: RoundPlan, model: int) -> Float32Vector:
        """Return a clear model of ``plan``, (d,) float32: that of the round carried out last, or of the next or final one."""
        current = self._current
        if current is not None and plan is current.plan:
            # After the round's close devices may hold no such state any more.
            theta: Float32Vector = current.models[current.row_of[model]].cpu().numpy().copy()
            return theta
        return self.models.theta(plan, model)

    def whole(self, models: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return models (c, d) with the private coordinates of the devices at ``places`` (c,): (c, d + p)."""
        if self.private is None:
            return models
        own, federated = self.private.of(places), torch.from_numpy(models).to(self.device)
        joined: NDArray[np.float32] = self.private.joined(federated, own).cpu().numpy()
        return joined

    def carry_out(self, plan: RoundPlan) -> list[ClientUpdate]:
        """Carry out every order of ``plan``; return the devices' uploads, in order of their names.

        A device whose training diverges uploads nothing and is in `diverged`.

        Raises:
            DivergedError: no device is left whose training succeeds; on several ranks, that of one fails.
        """
        self.models.open_round(plan.round)
        self.models.links.open_round(plan)
        ids = sorted(plan.models)
        thetas = np.stack([self.theta(plan, model) for model in ids])
        if self.ranks.world > 1:
            self.ranks.agree(f"round {plan.round}", thetas.tobytes(), repr(sorted(plan.assignments.items())).encode())
        models = torch.from_numpy(thetas).to(self.device)
        self._current = _Round(plan, models, {model: row for row, model in enumerate(ids)})
        deferred = self._defers(plan)
        if self.declared is not None:
            used = {self.scale_of(plan, model) for model in ids if model not in FOR_ALL}
            self._shelves = {scale: found for scale, found in self._shelves.items() if scale in used}
            self._trainers = {scale: found for scale, found in self._trainers.items() if scale in used}
        self.diverged = set()
        given: list[ClientUpdate] = []
        summed: list[ClientUpdate] = []
        with torch.no_grad():
            for group in self._groups(plan):
                found = self._carry_out_group(group, ids, deferred)
                given += found
                summed += found if deferred and group[0].train else []
        training = {device for device, assignment in plan.assignments.items() if assignment.trains}
        self._sound = (self._sound | training) - self.diverged
        if self.diverged and not self._sound:
            raise DivergedError(np.array([self.place_of[name] for name in self.diverged]))
        # After all groups, since devices of two groups may have trained the same model.
        self._join_sums(summed)
        return sorted(given, key=lambda c: c.device)

    def average(self, contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
        """Return the mean of contributions' masked updates, (d,) float32: see `aggregator.strategies.base.Average`.

        The sums of this round are used for a model if ``contributions`` has all devices that trained it; otherwise the
        devices in ``contributions`` are trained once more.
        """
        if all(c.vector is not None for c in contributions):
            return mean_update(contributions, weighting, cap)
        current = self._current
        if current is None or any(c.vector is not None or c.round != current.plan.round for c in contributions):
            raise IntegrityError("a mean over updates that the simulator never kept", hint="use deferred=False")
        alike = weighting == "uniform" or self._equal
        weights = weights_of(contributions, "uniform" if alike else weighting, cap).tolist()
        # All devices at the weight cap have the same weight, so their unweighted sum is enough.
        asked: dict[tuple[int, int, float], list[ClientUpdate]] = defaultdict(list)
        for c, w in zip(contributions, weights, strict=True):
            asked[int(c.phase), c.model, 0.0 if alike or w == c.samples else w].append(c)
        total = torch.zeros(self.network.length, device=self.device)
        for (phase, model, limit), chosen in asked.items():
            kept = current.sums.get((phase, model))
            if kept is None or kept.devices != {c.device for c in chosen}:
                kept = self._sum_again(current, (phase, model), chosen)
            if limit:
                total += kept.uniform * limit
            else:
                total += kept.uniform if weighting == "uniform" or kept.samples is None else kept.samples
        mean: Float32Vector = (total / sum(weights)).cpu().numpy()
        return mean if self.models.mask is None else mask(mean, self.models.mask).values

    def _sent(self, clear: Float32Vector, assignment: Assignment, place: int, model: int) -> Float32Vector:
        """Return an update, masked, as the aggregator decodes it."""
        return self.models.links.update(
            clear,
            self.models.mask,
            device=self.population.names[int(place)],
            model=model,
            phase=assignment.phase,
            round_=self._round.plan.round,
        )

    def _defers(self, plan: RoundPlan) -> bool:
        if self.deferred is not None:
            return self.deferred
        if self.reads == "updates":
            return False
        known = self._equal or self.run.recipe.weighting == "uniform" or not self.run.recipe.weight_cap
        if known and not self._watched:
            return True
        # The cap follows from the samples of all devices in a mean, which are known only when all have chosen their model.
        # Devices that are capped would be trained a second time, so single updates are better if there is room for them.
        training = sum(assignment.train for assignment in plan.assignments.values())
        return 4 * training * self.network.length > ROWS_BYTES

    def _groups(self, plan: RoundPlan) -> list[Group]:
        """Group devices with equal orders; orders with a single candidate may differ in that candidate."""
        row_of = self._round.row_of
        members: dict[tuple[Assignment, Scale | None], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        scales = {model: self.scale_of(self._round.plan, model) for model in row_of if model not in FOR_ALL}
        for name in sorted(plan.assignments):
            assignment = plan.assignments[name]
            alone = len(assignment.scored) == 1
            # Devices that train one model each can share a block even if their models differ.
            mixed = alone and assignment.phase is not Phase.ADAPT
            key = dataclasses.replace(assignment, candidates=(0,)) if mixed else assignment
            scale = scales.get(assignment.scored[0]) if alone else None
            members[key, scale].append((self.place_of[name], assignment.scored))
        groups: list[Group] = []
        for (assignment, _), work in members.items():
            ids = np.array([place for place, _ in work], np.int64)
            alone = len(assignment.scored) == 1
            rows = [[row_of[c] for c in candidates] for _, candidates in (work if alone else work[:1])]
            groups.append((assignment, ids, np.array(rows, np.int64)))
        return groups

    def _carry_out_group(self, group: Group, ids: Sequence[int], deferred: bool) -> list[ClientUpdate]:
        assignment, places, candidates = group
        if assignment.phase is Phase.STATISTICS:
            return self._statistics(places, [ids[row] for row in candidates[:, 0]])
        if candidates.shape[1] > 1 and self.declared is not None:
            return self._carry_out_best(group, ids, deferred)
        self.use_scale(self._round.plan, ids[int(candidates[0, 0])])
        sizes = self.shelf(Share.TRAIN if assignment.trains else assignment.share).sizes[places]
        shares = self.ranks.parts(sizes)
        mine = places[shares[self.ranks.rank]]
        parts = [mine] if len(mine) else []
        recipe = self._recipe(assignment.phase)
        if assignment.trains:
            parts = self.shelf(Share.TRAIN).parts(mine, self.trainer.limits(candidates.shape[1], recipe))
        position = {int(p): i for i, p in enumerate(places)}

        def carry_out(part: NDArray[np.int64]) -> list[ClientUpdate]:
            rows = candidates if len(candidates) != len(places) else candidates[[position[int(p)] for p in part]]
            return self._carry_out_part(assignment, part, rows, ids, deferred)

        found, lost = without_diverged(parts, carry_out)
        self.diverged |= {self.population.names[place] for place in lost}
        if lost and self.ranks.world > 1:
            raise DivergedError(np.array(lost))
        given = [update for updates in found for update in updates]
        return given if self.ranks.world == 1 else self._exchanged(group, shares, given, deferred)

    def _statistics(self, places: NDArray[np.int64], models: Sequence[int]) -> list[ClientUpdate]:
        """Return uploads of how the statistics of the devices at ``places`` (c,) differ from those of ``models``."""
        assert self.declared is not None
        found = []
        for place, model in zip(places.tolist(), models, strict=True):
            own = statistics_of(self.population.train[place].x, self.declared, self.run.length)
            row = self._sent(own - self.theta(self._round.plan, model), STATISTICS_ASSIGNMENT, place, model)
            update = self._upload(STATISTICS_ASSIGNMENT, place, model)
            found.append(dataclasses.replace(update, vector=row, norm=norm_of(row)))
        return found

    def _carry_out_best(self, group: Group, ids: Sequence[int], deferred: bool) -> list[ClientUpdate]:
        """Carry out an order with candidates in scales of their own: first choose, then do the rest with the best one."""
        assignment, places, candidates = group
        options = [ids[row] for row in candidates[0].tolist()]
        rows = self._round.models[torch.from_numpy(candidates[0]).to(self.device)]
        losses = self.losses(self._round.plan, options, rows, assignment.share, places)
        best, given = scoring.choose(losses), []
        for at in np.unique(best):
            mine = np.flatnonzero(best == at)
            order = dataclasses.replace(assignment, candidates=(options[at],), margins=False)
            given += self._carry_out_group(
                (order, places[mine], candidates[:1, at : at + 1].repeat(len(mine), 0)), ids, deferred
            )
        squared = self.network.kind == "regression"
        lines = {self.population.names[place]: line for place, line in zip(places.tolist(), losses, strict=True)}
        return [
            dataclasses.replace(
                update,
                loss=round(float(lines[update.device].min()), LOSS_DECIMALS),
                margins=reported_margins(lines[update.device], squared=squared) if assignment.margins else (),
            )
            for update in given
        ]

    def _exchanged(
        self, group: Group, shares: Sequence[NDArray[np.int64]], given: Sequence[ClientUpdate], deferred: bool
    ) -> list[ClientUpdate]:
        """Return the uploads of all devices of a group, of which this rank has ``given``."""
        assignment, places, candidates = group
        names = [self.population.names[int(p)] for p in places]
        own = {c.device: c for c in given}
        return exchange(
            self.ranks,
            [own[names[i]] for i in shares[self.ranks.rank]],
            names,
            shares,
            ClientUpdate(
                round=self._round.plan.round,
                phase=assignment.phase,
                device="",
                model=0,
                samples=0,
                loss=0.0,
                key_id=self.models.key_id,
            ),
            margins=max(assignment.figures, candidates.shape[1]),
            length=0 if deferred or not assignment.train else self.run.length,
        )

    def _join_sums(self, given: Sequence[ClientUpdate]) -> None:
        """Replace this rank's sums of the updates of ``given``, the uploads of all ranks, by the sums over all ranks."""
        if self.ranks.world == 1:
            return
        sums = self._round.sums
        for key in sorted({(int(c.phase), c.model) for c in given}):
            own = sums.get(key) or self._no_sum()
            joined = [
                None if part is None else self.ranks.sum(part).to(self.device, torch.float32)
                for part in (own.uniform, own.samples)
            ]
            assert joined[0] is not None
            sums[key] = _Sum(joined[0], joined[1], {c.device for c in given if (int(c.phase), c.model) == key})

    def _no_sum(self) -> _Sum:
        zero = torch.zeros(self.network.length, device=self.device)
        return _Sum(zero, None if self._equal else zero.clone())

    def _carry_out_part(
        self,
        assignment: Assignment,
        part: NDArray[np.int64],
        candidates: NDArray[np.int64],
        ids: Sequence[int],
        deferred: bool,
    ) -> list[ClientUpdate]:
        models = self._round.models
        margins: list[tuple[float, ...]] = [()] * len(part)
        reported = np.zeros(len(part))
        start = candidates[:, 0] if candidates.shape[1] == 1 else np.zeros(len(part), np.int64)
        block = self.shelf(Share.TRAIN).block(part) if assignment.trains else None
        scored: Scored | None = None
        if candidates.shape[1] > 1:
            options = models[torch.from_numpy(candidates[0]).to(self.device)]
            # Scoring and training use the same first-layer outputs, so the dual form computes them once.
            fuses = self.private is None and assignment.share == Share.TRAIN
            dual = self.trainer if fuses and isinstance(self.trainer, Dual) else None
            if dual is not None and block is not None and dual.spans(block, self._recipe(assignment.phase)):
                scored = dual.score(options, block)
            losses = self.score(options, assignment.share, part).losses if scored is None else scored.losses
            best = scoring.choose(losses)
            start, reported = candidates[0][best], losses[np.arange(len(part)), best]
            if assignment.margins:
                margins = [reported_margins(row, squared=self.network.kind == "regression") for row in losses]
        elif not assignment.trains:
            reported = self.score_own(start, assignment.share, part).losses[:, 0]
        correct = tested = np.zeros(len(part), np.int64)
        if assignment.evaluate:
            own = self.score_own(start, Share.TEST, part)
            correct, tested = own.correct[:, 0], own.tested
        rows: Sequence[Float32Vector | None] = [None] * len(part)
        norms = np.zeros(len(part))
        lengths = np.zeros(len(part))
        nearest = np.zeros(len(part), np.int64)
        if block is not None:
            trained = self._train(assignment, block, start, None if scored is None else scored.of(best))
            if candidates.shape[1] == 1:
                reported = trained.losses
            if assignment.phase is Phase.ADAPT:
                margins = self._adapted_margins(assignment, block, start, trained)
            # Nothing diverges from here on, so that no update is sent or summed twice.
            if deferred and assignment.train:
                norms = trained.norms() if self.norms else norms
                self._add(trained, assignment, part, [ids[s] for s in start], start)
            elif assignment.train:
                updates = trained.rows().cpu().numpy()
                rows = [
                    self._sent(row, assignment, p, ids[int(s)]) for row, p, s in zip(updates, part, start, strict=True)
                ]
                norms = np.array([norm_of(row) for row in rows if row is not None])
            if assignment.norm:
                lengths = self._model_norms(trained, start)
            if assignment.compare:
                nearest = self._nearest(assignment, trained, start, ids)
            self._keep_private(assignment, part, trained)
        return [
            dataclasses.replace(
                self._upload(assignment, int(place), ids[int(start[i])]),
                # Rounded as a device rounds it, or strategies would see finer figures here than in a fleet.
                loss=round(float(reported[i]), LOSS_DECIMALS),
                margins=margins[i],
                correct=int(correct[i]),
                tested=int(tested[i]),
                vector=rows[i],
                norm=float(norms[i]),
                model_norm=round(float(lengths[i]), NORM_DECIMALS),
                nearest=int(nearest[i]),
            )
            for i, place in enumerate(part)
        ]

    def _upload(self, assignment: Assignment, place: int, model: int) -> ClientUpdate:
        """Return the upload of the device at ``place`` without its figures and its update."""
        return ClientUpdate(
            round=self._round.plan.round,
            phase=assignment.phase,
            device=self.population.names[place],
            model=model,
            samples=int(self.samples[place]),
            loss=0.0,
            key_id=self.models.key_id,
        )

    def _adapted_margins(
        self, assignment: Assignment, block: Block, start: NDArray[np.int64], trained: Trained
    ) -> list[tuple[float, ...]]:
        """Return, for each device of a block, how much worse the other candidates are than the first: see `trial_margins`."""
        row_of, models = self._round.row_of, self._round.models
        ids = [list(row_of)[int(start[0])], *assignment.candidates[1:]]
        rows = [start, *(np.full(len(start), row_of[other], np.int64) for other in ids[1:])]
        before: list[list[NDArray[np.float64]]] = [[] for _ in block.ids]
        after: list[list[float]] = [[] for _ in block.ids]
        for at, (model, row) in enumerate(zip(ids, rows, strict=True)):
            self.use_scale(self._round.plan, model)
            given = models[torch.from_numpy(row).to(self.device)]
            again = trained if at == 0 else self._train(assignment, self.shelf(Share.TRAIN).block(block.ids), row)
            thetas, shelf = self._trained(given, again), self.shelf(assignment.share)
            for i, place in enumerate(block.ids):
                one = np.array([place])
                before[i] += list(scoring.sample_losses(self.network, self._whole(given[i : i + 1], one), shelf, one))
                after[i].append(float(scoring.score(self.network, thetas[i : i + 1], shelf, one).losses[0, 0]))
        self.use_scale(self._round.plan, ids[0])
        labels = [self.shelf(assignment.share).joined(np.array([place]))[1].cpu().numpy() for place in block.ids]
        return [trial_margins(*figures) for figures in zip(before, map(np.array, after), labels, strict=True)]

    def _whole(self, models: Tensor, place: NDArray[np.int64]) -> Tensor:
        """Return models (k, d) with the private values of the device at ``place`` (1,), which it has trained last."""
        if self.private is None:
            return models
        return self.private.joined(models, self.private.of(place).expand(len(models), -1))

    def _trained(self, models: Tensor, trained: Trained) -> Tensor:
        """Return the whole models after a training that began with ``models`` (c, d)."""
        moved = models + trained.rows()
        if self.private is None or not isinstance(trained, PrivateRows):
            return moved
        return self.private.joined(moved, trained.private)

    def _model_norms(self, trained: Trained, start: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the l2 norm of every trained model, (c,) float64, for FedGroup's inter-group aggregation."""
        whole = trained.rows() + self._round.models[torch.from_numpy(start).to(self.device)]
        norms: NDArray[np.float64] = torch.linalg.vector_norm(whole.double(), dim=1).cpu().numpy()
        return norms

    def _nearest(
        self, assignment: Assignment, trained: Trained, start: NDArray[np.int64], ids: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return which of the compared models is nearest to each trained one, (c,) int64, by the rules of devices."""
        find = nearest_direction if assignment.phase is Phase.PLACE else nearest_model
        models = dict(zip(ids, self._round.models.cpu().numpy(), strict=True))
        pairs = zip(start, trained.rows().cpu().numpy(), strict=True)
        return np.array([find(ids[int(row)], delta, assignment.compare, models) for row, delta in pairs], np.int64)

    def _train(
        self,
        assignment: Assignment,
        block: Block,
        start: NDArray[np.int64],
        pre: Tensor | None = None,
    ) -> Trained:
        round_ = self._round.plan.round
        assignments = [BatchOrder(self.run, self.population.names[int(p)], round_) for p in block.ids]
        if self.private is not None:
            return self._train_private(self.private, assignment, block, start, assignments)
        work = (self._round.models, start, block, assignments, self._recipe(assignment.phase), round_)
        if pre is not None and isinstance(self.trainer, Dual):
            return self.trainer.train(*work, pre)
        return self.trainer.train(*work)

    def _train_private(
        self,
        private: PrivateParts,
        assignment: Assignment,
        block: Block,
        start: NDArray[np.int64],
        orders: Sequence[BatchOrder],
    ) -> PrivateRows:
        """Train as `_train`, each device a whole model of its own, without storing its private values."""
        before = private.of(block.ids)
        models = private.joined(self._round.models[torch.from_numpy(start).to(self.device)], before)
        places, recipe = np.arange(len(start)), self._recipe(assignment.phase)
        trained = self.trainer.train(models, places, block, orders, recipe, self._round.plan.round)
        updates, changes = private.cut(trained.rows())
        return PrivateRows(updates, trained.losses, before + changes)

    def _keep_private(self, assignment: Assignment, part: NDArray[np.int64], trained: Trained) -> None:
        """Store the private values that were trained beside uploaded updates; the last step of a round's work."""
        if self.private is not None and isinstance(trained, PrivateRows) and assignment.train:
            self.private.keep(part, trained.private)

    def _recipe(self, phase: int) -> LocalTraining:
        return self.run.pretrain if phase in (Phase.PRETRAIN, Phase.PLACE) else self.run.local

    def _add(
        self,
        trained: Trained,
        assignment: Assignment,
        part: NDArray[np.int64],
        models: Sequence[int],
        start: NDArray[np.int64],
    ) -> None:
        """Add a block's updates to the sums of the models that they started from."""
        for row in np.unique(start):
            chosen = np.flatnonzero(start == row)
            key = (int(assignment.phase), int(models[int(chosen[0])]))
            if key not in self._round.sums:
                self._round.sums[key] = self._no_sum()
            total = self._round.sums[key]
            trained.add_to(total.uniform, chosen, None)
            if total.samples is not None:
                trained.add_to(total.samples, chosen, self.samples[part[chosen]].astype(np.float32))
            total.devices |= {self.population.names[int(p)] for p in part[chosen]}

    def _sum_again(self, current: _Round, key: tuple[int, int], chosen: Sequence[ClientUpdate]) -> _Sum:
        """Train some devices of this round once more, for a mean over other devices than those that were summed."""
        phase, model = key
        self.use_scale(current.plan, model)
        places = np.array(sorted(self.place_of[c.device] for c in chosen), np.int64)
        assignment = next(o for o in current.plan.assignments.values() if o.phase == phase and o.train)
        kept = current.sums
        current.sums = {}  # `_add` writes to it; the round's own sums are restored below
        try:
            with torch.no_grad():
                mine = places[self.ranks.parts(self.shelf(Share.TRAIN).sizes[places])[self.ranks.rank]]
                for part in self.shelf(Share.TRAIN).parts(mine, self.trainer.limits(1, self._recipe(phase))):
                    start = np.full(len(part), current.row_of[model], np.int64)
                    block = self.shelf(Share.TRAIN).block(part)
                    self._add(self._train(assignment, block, start), assignment, part, [model] * len(part), start)
            self._join_sums(chosen)
            return current.sums[key]
        finally:
            current.sums = kept

    def samples_of(self, share: Share | int, places: NDArray[np.int64]) -> Shelf:
        """Return one share of all devices' data.

        Raises:
            DataError: a device at ``places`` (c,) has no samples in that share.
        """
        shelf = self.shelf(share)
        if not shelf.sizes[places].all():
            raise DataError(f"a simulated device has no {Share(share).name.lower()} samples")
        return shelf

    def score(self, models: Tensor, share: Share | int, places: NDArray[np.int64]) -> scoring.Scores:
        """Score every model (k, d), with each device's private values, on one share of the devices at ``places`` (c,).

        Raises:
            DataError: one of them has no samples in that share.
        """
        return self.score_on(models, self.samples_of(share, places), places)

    def score_together(self, models: Tensor, shelf: Shelf, places: NDArray[np.int64]) -> scoring.Scores:
        """Score as `score_on`, each rank some of the devices. All ranks have to call it."""
        if self.ranks.world == 1:
            return self.score_on(models, shelf, places)
        parts, k = self.ranks.parts(shelf.sizes[places]), len(models)
        mine = places[parts[self.ranks.rank]]
        own = np.empty((len(mine), 2 * k + 1))
        if len(mine):
            found = self.score_on(models, shelf, mine)
            own[:] = np.column_stack((found.losses, found.correct, found.tested))
        table = self.ranks.rows(own, parts)
        counts = table[:, k:].astype(np.int64)
        return scoring.Scores(table[:, :k], counts[:, :k], counts[:, k])

    def score_on(self, models: Tensor, shelf: Shelf, places: NDArray[np.int64]) -> scoring.Scores:
        """Score every model (k, d), with each device's private values, on the shards of a shelf at ``places`` (c,)."""
        if self.private is None:
            return scoring.score(self.network, models, shelf, places)

        def own(_: int, mine: NDArray[np.int64]) -> scoring.Scores:
            return scoring.score(self.network, self._whole(models, places[mine]), shelf, places[mine])

        return scoring.score_each(np.arange(len(places)), own, len(models))

    def score_own(self, start: NDArray[np.int64], share: Share | int, places: NDArray[np.int64]) -> scoring.Scores:
        """Score one model on each device; ``start`` (c,) has its row among this round's models. Returns arrays (c, 1)."""
        models = self._round.models
        return scoring.score_each(start, lambda row, mine: self.score(models[row : row + 1], share, places[mine]))
