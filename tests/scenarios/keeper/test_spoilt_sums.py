"""One device spoils the sums of a run with a keeper: it costs a few rounds, and a group of at least three, which is named."""

from __future__ import annotations

import numpy as np
import pytest

import edge_client.learning.update
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    events,
    grouped_data,
    make_fleet,
    names,
    restart_aggregator,
    thetas,
)

OPTIONS = {"mode": "rotation", "min_contributors": 3, "deadline_s": 5.0}


def spoil(monkeypatch, liar, kind):
    """Let one device send a wrong code, a wrong pad, or an update that it says to be short."""
    encoded, share = edge_client.learning.update._encoded, edge_client.learning.update._with_share

    def wrong(context, update, *arguments):
        mine = context.identity.name == liar
        if mine and kind == "long":
            update = update * np.float32(300)
        found, beside = encoded(context, update, *arguments)
        if mine and kind == "code":
            beside = beside._replace(checks=((beside.checks[0] + 1) % 1000, *beside.checks[1:]))
        return found, beside

    def told(context, upload, keeper, norm, pad, unit):
        mine = context.identity.name == liar
        pad = bytes(32) if mine and kind == "pad" else pad
        return share(context, upload, keeper, norm / 300 if mine and kind == "long" else norm, pad, unit)

    monkeypatch.setattr(edge_client.learning.update, "_encoded", wrong)
    monkeypatch.setattr(edge_client.learning.update, "_with_share", told)


@pytest.mark.parametrize("kind", ["code", "pad", "long"])
@pytest.mark.parametrize("place", with_long((0, 5, 11), 5))
def test_one_who_spoils_sums_is_found(tmp_path, stages, monkeypatch, kind, place):
    liar = names(12)[place]
    spoil(monkeypatch, liar, kind)
    options = {**OPTIONS, "rounds": 16}
    with make_fleet(tmp_path, grouped_data(12), stage=stages(tmp_path / "stage", 12), **options) as fleet:
        records = fleet.run(1000)
        (found,) = events(records, "group-left-out")
        assert liar in found["devices"]
        assert 3 <= len(found["devices"]) <= 5
        assert found["round"] <= 8
        assert records[-1]["correct"] > 0.8 * records[-1]["tested"] > 0
        assert len(set(thetas(fleet).values())) == 1
        assert events(records, "spoilt")[-1]["round"] <= found["round"]


def test_cell_of_five_cannot_be_searched(tmp_path, stages, monkeypatch):
    """The owner is told whose sums are spoilt, and revokes one of them."""
    spoil(monkeypatch, "dev-02", "pad")
    options = {**OPTIONS, "rounds": 3}
    with make_fleet(tmp_path, grouped_data(5), stage=stages(tmp_path / "stage", 5), **options) as fleet:
        records = fleet.run(200)
        spoilt = events(records, "spoilt")
        assert len(spoilt) == 3
        assert all("can't be searched" in event["reason"] for event in spoilt)
        assert spoilt[0]["devices"] == list(names(5))


def test_two_clusters_and_one_liar(tmp_path, stages, monkeypatch):
    """The other cluster goes on."""
    spoil(monkeypatch, "dev-04", "code")
    options = {**OPTIONS, "rounds": 24}
    options |= {"algorithm": "ifca", "settings": {"k": "2", "restarts": "1"}}
    data = grouped_data(16, groups=2)
    with make_fleet(tmp_path, data, stage=stages(tmp_path / "stage", 16), **options) as fleet:
        records = fleet.run(2000)
        assert "dev-04" in events(records, "group-left-out")[0]["devices"]
        assert records[-1]["tested"] > 0


def test_last_step_is_spoilt(tmp_path, stages, monkeypatch):
    """Devices refuse the last mean in the final round: the run ends, and they keep the models of the round before."""
    options = {**OPTIONS, "rounds": 3}
    with make_fleet(tmp_path, grouped_data(6), stage=stages(tmp_path / "stage", 6), **options) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 100)
        spoil(monkeypatch, "dev-01", "code")
        records = fleet.run(100)
        assert events(records[-1:], "spoilt")
        assert {fleet.model(name).round for name in names(6)} == {3}


def test_search_goes_on_after_restarts(tmp_path, stages, monkeypatch):
    """The aggregator is killed in each round, before the round closes or after."""
    spoil(monkeypatch, "dev-07", "code")
    options = {**OPTIONS, "rounds": 14}
    with make_fleet(tmp_path, grouped_data(12), stage=stages(tmp_path / "stage", 12), **options) as fleet:
        while not fleet.finished:
            closed = fleet.closed()
            fleet.run_until(lambda closed=closed: fleet.closed() > closed or fleet.finished, 200)
            if not fleet.finished:
                for _ in range(closed % 5):
                    fleet.step()
                restart_aggregator(fleet)
        (found,) = events(fleet.records(), "group-left-out")
        assert "dev-07" in found["devices"]
        assert fleet.records()[-1]["correct"] > 0.8 * fleet.records()[-1]["tested"]
