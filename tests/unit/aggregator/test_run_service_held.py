"""A run on the real service: the models that devices hold stay the same on all, through any restart."""

import pytest

from aggregator.publisher import Publisher
from aggregator.storage.store import Store
from edge_client.run.held_models import HeldModels
from shoal.owner.enrolment.admission import Registrar
from shoal.protocol.states import StateId
from shoal.protocol.topics import Topics
from tests.helpers.fleets import (
    Wiretap,
    announcements,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    restart_aggregator,
    same_partition,
    thetas,
)

ROUNDS, COUNT = 5, 4
OPTIONS = {"quorum": 0.5, "deadline_s": 30.0, "min_contributors": 2}


@pytest.fixture
def tap():
    return Wiretap()


@pytest.fixture
def fleet(tmp_path, tap):
    """Four devices in their second round."""
    with make_fleet(tmp_path / "fleet", count=COUNT, rounds=ROUNDS, faults=tap, mode="rotation", **OPTIONS) as made:
        made.run_until(lambda: made.closed() == 1, 10)
        yield made


def finished(fleet):
    """Finish the run and return its records; all devices end with the same model."""
    records = fleet.run(600)
    assert len(set(thetas(fleet).values())) == 1
    return records


class Crash(Exception):  # noqa: N818 - stands for the end of the process
    """The process ends here."""


def run_to_crash(fleet, owner, method, *, after=False):
    """Run until a method is called, which ends the process before its work or after it; start the aggregator again."""
    real = getattr(owner, method)

    def crash(*args, **options):
        if after:
            real(*args, **options)
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, crash)
        with pytest.raises(Crash):
            fleet.run(600)


def test_another_bit_leads_to_a_checkpoint(fleet, monkeypatch):
    """A device with another bit is left out, recorded, and takes a checkpoint."""
    real = HeldModels.thetas

    def damaged(held, announcement, assignment):
        found = real(held, announcement, assignment)
        if (held._membership.name, announcement.round) == ("dev-02", 3):
            run_id = fleet.plan.run_id
            flipped = [
                type(s).of(s.id, s.theta * (1 + 1e-6), run_id=run_id, digest_key=s.digest_key)
                for s in held.states.held.values()
            ]
            held.states = held.states.with_states(flipped)
        return found

    monkeypatch.setattr(HeldModels, "thetas", damaged)
    records = finished(fleet)
    assert [r["out_of_step"] for r in records] == [{}, {}, {"dev-02": 0}, *[{}] * 3]
    assert records[-1]["contributed"] == COUNT


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_around_the_next_snapshot(fleet, tap, after):
    """After a complete round the next one is announced before its snapshot is durable."""
    for round_ in (2, 3, 4):
        run_to_crash(fleet, Store, "snapshot", after=after)
        announced = announcements(fleet, tap)[-1]
        restart_aggregator(fleet)
        again = announcements(fleet, tap)[-1]
        assert (again.round, again.nonce) == (round_ + 1, announced.nonce)
        assert again.held.offers == announced.held.offers
        assert [kept.step for kept in again.held.steps] == [kept.step for kept in announced.held.steps]
        assert again.assignments == announced.assignments
    assert [r["contributed"] for r in finished(fleet)] == [COUNT] * (ROUNDS + 1)


def test_crash_before_the_final_record(fleet, tap):
    """A crash between the final announcement and its record loses no checkpoint: they stay on the broker and on disk."""
    fleet.run_until(lambda: fleet.service.state.plan.final, 60)
    run_to_crash(fleet, Store, "snapshot")
    restart_aggregator(fleet)
    assert fleet.finished
    assert fleet.records()[-1]["contributed"] == COUNT
    for _ in range(2):
        announced = announcements(fleet, tap)[-1]
        (checkpoint,) = announced.held.checkpoints
        assert (announced.finished, checkpoint.state, checkpoint.round) == (True, StateId(0, ROUNDS), ROUNDS + 1)
        assert len(announced.held.statements) == OPTIONS["min_contributors"]
        topic = Topics(fleet.plan.fleet).model(checkpoint.label)
        assert any(retained.startswith(topic) for retained in fleet.broker.retained)
        restart_aggregator(fleet)
    finished(fleet)


def test_crash_after_the_keys_have_turned(fleet, tap):
    """The open round goes on under its own version, the next one is under the newer one, crash or not."""
    before = fleet.service.state.held.key_version
    fleet.stage.fleet.rotate()
    fleet.publish()
    assert fleet.service.state.held.key_version == before
    run_to_crash(fleet, Publisher, "open_round")
    restart_aggregator(fleet)
    assert (fleet.service.state.round, fleet.service.state.held.key_version) == (3, fleet.stage.fleet.roster.keys_since)
    assert [r["contributed"] for r in finished(fleet)] == [COUNT] * (ROUNDS + 1)


def test_round_waits_for_the_rosters_keys(fleet, monkeypatch):
    """A round waits for the keys that the newest roster names."""
    fleet.stage.fleet.rotate()
    with monkeypatch.context() as patch:
        patch.setattr(Registrar, "publish_keys", lambda *_: None)
        fleet.publish()
    fleet.run_until(lambda: fleet.service.state.plan is None, 60)
    assert "the newer ones have not arrived yet" in fleet.service.status()
    fleet.rest(100)
    assert fleet.service.state.plan is None
    fleet.publish()
    finished(fleet)


SPLITS = {"form": "absolute", "eps1": 0.3, "eps2": 0.2, "cool_down": 0}
RUNS = {
    "ifca restarts": ("ifca", {"k": 2, "restarts": 2, "restart_rounds": 2}),
    # Each group's model is a sum of all groups' models.
    "fedgroup adding": ("fedgroup", {"groups": 2, "alpha": 2, "eta_g": 0.1}),
    "cfl looking": ("cfl", {**SPLITS, "validate": "off", "look_every": 4}),
    "cfl validating": ("cfl", {**SPLITS, "p_value": 0.5, "margin": 0.01, "merge_every": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_restarts_change_nothing_in_records(tmp_path, name):
    algorithm, settings = RUNS[name]
    options = {"algorithm": algorithm, "settings": settings, "rounds": 6, **OPTIONS}
    found = []
    for kills in (False, True):
        with make_exact_fleet(tmp_path / str(kills), grouped_data(6, 2), **options) as fleet:
            while kills and not fleet.finished:
                done = fleet.closed()
                fleet.run_until(lambda done=done, fleet=fleet: fleet.closed() > done, 60)
                restart_aggregator(fleet)
            records = fleet.run(200)
            assert [(r["out_of_step"], r["declined"]) for r in records] == [({}, {})] * 7
            assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, records[-1]["clusters"])
            events = [(e["round"], e["kind"]) for r in records for e in r["events"]]
            found.append((events, [(r["clusters"], r["loss"], r["norms"]) for r in records]))
    assert found[0] == found[1]
