"""Accuracy of clear models. It is measured outside the strategy and does not influence the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.strategies.base import RoundPlan
from shoal.protocol.messages import Phase, Share
from shoal.simulation.trainers import scoring
from shoal.simulation.trainers.blocks import Shelf

if TYPE_CHECKING:
    from shoal.simulation.engine.workforce import Workforce

Protocol = Literal["argmin", "assigned"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracies after one round, in percent.

    Attributes:
        accuracy: over all test labels together; median: over the tested shards.
        loss: mean test loss, weighted by samples.
        models: the model of each tested shard; correct, tested: its numbers of labels; arrays (t,), int64.
        losses: mean test loss of each tested shard, (t,), float64.
        names: the tested devices, empty for probes.
    """

    accuracy: float
    median: float
    loss: float
    models: NDArray[np.int64]
    correct: NDArray[np.int64]
    tested: NDArray[np.int64]
    losses: NDArray[np.float64]
    names: tuple[str, ...]


def evaluate(workforce: Workforce, final: RoundPlan, protocol: Protocol) -> Evaluation | None:
    """Test the models of a final round.

    Args:
        workforce: the devices' data, the origins and the mask.
        final: the strategy's plan of a final round: each device's candidates.
        protocol: ``argmin``: every test shard (a probe if the population has any, else a device's own) takes the model with
            the least loss on itself, as IFCA's test machines do; ``assigned``: each device takes the best of its candidates
            by its order's share and is tested on its own test samples.

    Returns:
        None if there are no test samples.
    """
    population = workforce.population
    ids = sorted(final.models)
    thetas = np.stack([workforce.theta(final, model) for model in ids])
    models = torch.from_numpy(thetas).to(workforce.device)
    if protocol == "argmin":
        shelf = workforce.probes if population.probes else workforce.shelf(Share.TEST)
        places = np.flatnonzero(shelf.sizes)
        if len(places) == 0:
            return None
        scores = workforce.score_together(models, shelf, places)
        best = scoring.choose(scores.losses)
        names = () if population.probes else tuple(population.names[int(p)] for p in places)
        return _evaluation(scores, best, np.array(ids), names, shelf, places)
    shelf = workforce.shelf(Share.TEST)
    ordered = np.array(sorted(workforce.place_of[name] for name in final.assignments), np.int64)
    places = ordered[shelf.sizes[ordered] > 0] if len(ordered) else ordered
    if len(places) == 0:
        return None
    chosen = assigned(workforce, final, models, ids, places)

    def score(row: int, mine: NDArray[np.int64]) -> scoring.Scores:
        workforce.use_scale(final, ids[row])
        return workforce.score_together(models[row : row + 1], workforce.shelf(Share.TEST), places[mine])

    scores = scoring.score_each(chosen, score)
    names = tuple(population.names[int(p)] for p in places)
    return _evaluation(scores, np.zeros(len(places), np.int64), np.array(ids)[chosen], names, shelf, places)


def assigned(
    workforce: Workforce, final: RoundPlan, models: torch.Tensor, ids: list[int], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the row of the model that each device at ``places`` (t,) takes, shape (t,), by its assignment in ``final``."""
    row_of = {model: row for row, model in enumerate(ids)}
    chosen = np.empty(len(places), np.int64)
    undecided: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for i, place in enumerate(places):
        assignment = final.assignments[workforce.population.names[int(place)]]
        # With KEEP the other candidates are the models above the device's own in cfl's tree: stored, but not scored.
        if len(assignment.candidates) == 1 or assignment.phase == Phase.KEEP:
            chosen[i] = row_of[assignment.candidates[0]]
        else:
            undecided.setdefault((assignment.candidates, assignment.share), []).append(i)
    # Devices with the same choice are scored together, by one matrix product.
    for (candidates, share), rows in undecided.items():
        options = np.array([row_of[c] for c in candidates])
        rows_of = models[torch.from_numpy(options).to(models.device)]
        losses = workforce.losses(final, candidates, rows_of, share, places[rows])
        chosen[rows] = options[scoring.choose(losses)]
    return chosen


def _evaluation(
    scores: scoring.Scores,
    best: NDArray[np.int64],
    models: NDArray[np.int64],
    names: tuple[str, ...],
    shelf: Shelf,
    places: NDArray[np.int64],
) -> Evaluation:
    rows = np.arange(len(best))
    correct, losses = scores.correct[rows, best], scores.losses[rows, best]
    taken = models if len(models) == len(best) and scores.losses.shape[1] == 1 else models[best]
    return Evaluation(
        accuracy=100.0 * float(correct.sum() / scores.tested.sum()),
        median=100.0 * float(np.median(correct / scores.tested)),
        loss=float(np.average(losses, weights=shelf.sizes[places])),
        models=taken,
        correct=correct,
        tested=scores.tested,
        losses=losses,
        names=names,
    )
