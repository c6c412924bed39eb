"""Devices that sign a false transcript of the run: each costs itself alone, and the honest devices finish."""

import dataclasses

import pytest

from edge_client.run import held_models
from shoal.membership.statements import sign_statement, signers_needed
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    names,
    reasons,
    restart_device,
)
from tests.helpers.owner_models import reader_of

FALSE = b"f" * 32


@pytest.fixture
def lying(monkeypatch):
    """Return a set: the devices that sign a false transcript from now on, all the same one."""
    liars = set()

    def sign(identity, statement):
        if identity.name in liars:
            statement = dataclasses.replace(statement, transcript=FALSE)
        return sign_statement(identity, statement)

    monkeypatch.setattr(held_models, "sign_statement", sign)
    return liars


def left(fleet):
    """Return the devices that have left the run."""
    return {name for name in fleet.devices if fleet.devices[name].runtime._models._store.transcript.round > 1000}


FEW = [(7, ("dev-00", "dev-02"))]
MANY = [(n, (at,)) for n in (3, 5, 7, 12) for at in (names(n)[0], names(n)[n // 2], names(n)[-1])]
MANY += [(5, ("dev-00", "dev-04")), (12, ("dev-00", "dev-05")), (12, ("dev-10", "dev-11"))]


@pytest.mark.parametrize(
    ("count", "liars"), [*FEW, *(pytest.param(*case, marks=pytest.mark.long, id=str(case)) for case in MANY)]
)
def test_liars_cost_themselves_alone(tmp_path, lying, caplog, count, liars):
    """A device is away for two rounds, and a newcomer joins: both need what others have signed."""
    least = 2 if count == 3 else 3
    honest = [name for name in names(count) if name not in liars]
    with make_fleet(tmp_path, count=count, rounds=8, min_contributors=least, mode="rotation") as fleet:
        lying.update(liars)
        fleet.run_until(lambda: fleet.closed() >= 1, 1000)
        away = honest[-1] if count >= 7 else None  # the quorum of fewer needs it
        if away:
            fleet.kill_device(away)
        fleet.run_until(lambda: fleet.closed() >= 3, 1000)
        if away:
            fleet.revive_device(away)
        fleet.add_device("dev-99", grouped_data(count + 1)[names(count + 1)[-1]])
        records = fleet.run(3000)
        assert not left(fleet)
        assert not any(set(liars) & set(r["norms"]) for r in records)
        assert {d for r in records for d in r["declined"].items()} >= {(liar, "upload") for liar in liars}
        found = reader_of(fleet)
        assert found.finished_run().models
        assert found.histories() == []
        assert len({fleet.model(d).theta.tobytes() for d in (*honest, "dev-99")}) == 1
        assert not set(records[-1]["missing"]) - set(liars)
    for liar in liars:
        assert any(f"upload of {liar}" in r and "another history" in r for r in reasons(caplog))
    assert "odd one" not in caplog.text


def test_server_blames_itself_if_outvoted(tmp_path, lying, caplog):
    """One above the bound: three liars of seven, where three certify a state. The others still finish."""
    with make_fleet(tmp_path, count=7, rounds=4, min_contributors=3, mode="rotation") as fleet:
        assert signers_needed(3, 7) == 3
        lying.update(("dev-00", "dev-03", "dev-06"))
        fleet.run_until(lambda: "odd one" in caplog.text, 1000)
        facts = fleet.service.facts()
        assert "3 devices have signed another history of run 1" in facts.shortage
        assert "backup" in facts.advice
        assert not any(name in facts.shortage + facts.advice for name in names(7))
        fleet.run(3000)
        assert not left(fleet)


def test_abandoned_run_resumes_without_liars(tmp_path, lying):
    """A run that a device left by mistake is taken up again after the liars revocation."""
    with make_fleet(tmp_path, count=7, rounds=8, min_contributors=3, mode="rotation") as fleet:
        lying.add("dev-00")
        fleet.run_until(lambda: fleet.closed() >= 3, 1000)
        victims = ("dev-01", "dev-04")
        for name in victims:
            fleet.devices[name].runtime._models._store.refuse_run()
            restart_device(fleet, name)
        fleet.run_until(lambda: fleet.closed() >= 5, 1000)
        assert left(fleet) == set(victims)
        fleet.stage.fleet.revoke("dev-00")
        fleet.stage.fleet.rotate()
        fleet.publish()
        records = fleet.run(3000)
        assert not left(fleet)
        assert len({fleet.model(d).theta.tobytes() for d in names(7)[1:]}) == 1
        assert set(victims) <= set(records[-1]["norms"])
        assert not any("dev-00" in r["norms"] for r in records)
        assert reader_of(fleet).histories() == []
