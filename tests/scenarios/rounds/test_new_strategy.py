"""A strategy that is defined here, outside the package, runs on a fleet once it is registered: devices need no change."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from aggregator.strategies.base import (
    ClusterModel,
    Event,
    Outcome,
    RoundPlan,
    mean_update,
    parse_settings,
    train_assignment,
)
from aggregator.strategies.drawing import drawn
from aggregator.strategies.fedavg import MODEL, FedAvg, FedAvgSettings
from aggregator.strategies.registry import STRATEGIES
from shoal.owner.runs.training import describe
from shoal.protocol.documents import Capabilities
from shoal.protocol.messages import Assignment, Phase, Share
from tests.helpers.fleets import FULL_BATCH, make_fleet, open_upload, reasons, thetas, uploads_of

VOTE, WARM_UP = 1, 2


@dataclass(frozen=True, slots=True)
class BestStartSettings(FedAvgSettings):
    """Settings of the strategy below.

    Attributes:
        starts: starting models to choose from.
        declared: whether the capabilities include the margins that the strategy asks for.
    """

    starts: int = 3
    declared: bool = True

    @property
    def capabilities(self):
        return Capabilities(pretrain=True, margins=self.declared)

    @property
    def origins(self):
        return self.starts


class BestStart(FedAvg):
    """FedAvg from the start that devices prefer in round 1; in round 2 they train by the plan's ``pretrain`` recipe."""

    name = "best-start"
    settings_type = BestStartSettings

    def __init__(self, run, _backend=None, average=mean_update):
        self.run, self.average = run, average
        self.settings = parse_settings(BestStartSettings, run)

    @staticmethod
    def models(run):
        return parse_settings(BestStartSettings, run).starts

    def plan(self, state, round_, available):
        if round_ > WARM_UP:
            return super().plan(state, round_, available)
        starts = range(self.settings.starts)
        assignment = train_assignment((MODEL,), evaluate=False, phase=Phase.PRETRAIN)
        models = {MODEL: state.slot}
        if round_ == VOTE:
            assignment = Assignment(int(Phase.SCORE), tuple(starts), int(Share.VALIDATION), False, False, margins=True)
            models = {start: ClusterModel(origin=start) for start in starts}
        return state, RoundPlan(round_, models, dict.fromkeys(drawn(self.run, round_, available), assignment))

    def close(self, state, plan, given):
        if plan.round != VOTE or not given:
            return super().close(state, plan, given)
        best = int(np.mean([c.margins for c in given], axis=0).argmin())
        event = Event(plan.round, "start-chosen", {"origin": best})
        state = dataclasses.replace(state, slot=ClusterModel(origin=best))
        return state, Outcome(dict.fromkeys(state.devices, MODEL), (event,))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(STRATEGIES, BestStart.name, BestStart)


def fleet_of(root, tap, **settings):
    recipe = dataclasses.replace(FULL_BATCH, steps=30)
    options = {"algorithm": BestStart.name, "rounds": 4, "settings": settings, "pretrain": recipe}
    return make_fleet(root / "fleet", faults=tap, **options)


@pytest.mark.usefixtures("registered")
def test_devices_need_not_know_a_strategy(tmp_path, tap):
    """A new strategy runs on devices that do not know it."""
    with fleet_of(tmp_path, tap) as fleet:
        assert fleet.plan.capabilities == Capabilities(pretrain=True, margins=True)
        assert (fleet.plan.origins, fleet.plan.max_models) == (3, 3)
        records = fleet.run(20)
        sent = [[open_upload(fleet, d, u)[0] for u in uploads_of(fleet, tap, d)] for d in fleet.stage.devices]
        assert [[Phase(u.phase).name for u in each] for each in sent] == [
            ["SCORE", "PRETRAIN", "TRAIN", "TRAIN", "SCORE"]
        ] * 3
        preferred = int(np.mean([each[0].margins for each in sent], axis=0).argmin())
        assert [e["origin"] for e in records[0]["events"]] == [preferred]
        assert len(set(thetas(fleet).values())) == 1
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75


@pytest.mark.usefixtures("registered")
def test_undeclared_behaviour_is_refused(tmp_path, caplog, tap):
    """Devices refuse what its settings do not declare."""
    with fleet_of(tmp_path, tap, declared="off") as fleet:
        fleet.settle()
        assert [uploads_of(fleet, tap, d) for d in fleet.stage.devices] == [[], [], []]
    assert any("to report margins, which the plan does not allow" in reason for reason in reasons(caplog))


@pytest.mark.usefixtures("registered")
def test_owner_reads_its_settings_in_help():
    (text,) = [t for t in describe() if t.startswith("best-start:")]
    assert "starts=3 declared=on" in text
