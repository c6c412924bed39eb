"""Crashes: aggregator and devices die at any point, come back from their directories, and every update counts once."""

import numpy as np
import pytest
from shoal_lab.loopback.transport import Hop

from aggregator.storage.store import Store
from edge_client.protocol.round_state import Stage
from shoal.errors import IntegrityError
from shoal.protocol.messages import Action
from shoal.protocol.recipe import LocalTraining
from tests.helpers.broker_restarts import restart
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    SHARDS,
    Wiretap,
    answers,
    grouped_data,
    make_exact_fleet,
    restart_aggregator,
    restart_device,
    thetas,
    uploads_of,
)

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
STEPS = [(victim, step) for step in range(1, 9) for victim in ("aggregator", "dev-01")]
DEATHS = with_long(STEPS, *STEPS[::4], *STEPS[3::4])
"""Who dies at which step, by turns; `make long` has all of them."""
ONE_FILE = pytest.mark.skipif(SHARDS > 1, reason="looks into the updates' file of an aggregator without workers")
ALGORITHMS = {
    "fedavg": {"rounds": 4},
    "ifca": {
        "algorithm": "ifca",
        "rounds": 6,
        "local": QUICK,
        "settings": {"k": "2", "restarts": "2", "restart_rounds": "2"},
    },
    "cfl": {"algorithm": "cfl", "rounds": 7, "local": QUICK},
}


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def algorithm(request, tmp_path_factory):
    """(options, clusters and models that an undisturbed run ends with)."""
    options = {**ALGORITHMS[request.param], "quorum": 1.0}
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", grouped_data(6, 2), **options) as fleet:
        records = fleet.run(10)
        return options, records[-1]["clusters"], [r["norms"] for r in records], thetas(fleet)


@pytest.mark.parametrize("at_round", with_long([1, 4, 5], 4))
def test_stored_uploads_count_once(tmp_path, algorithm, at_round, tap):
    """It resumes the round: stored updates are not requested again, and the result is bit for bit the same."""
    options, clusters, norms, models = algorithm
    with make_exact_fleet(tmp_path / "fleet", grouped_data(6, 2), faults=tap, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == at_round - 1, 10)
        holds = [tap.lose(client=fleet.client_id(d), ending="/up") for d in ("dev-02", "dev-03")]
        fleet.settle()
        stored = answers(fleet, tap, "dev-00")[-1]
        assert (stored.action, stored.round) == (Action.ACK, at_round)
        before = len(uploads_of(fleet, tap, "dev-00"))
        restart_aggregator(fleet, steps=1)
        fleet.settle()
        assert f"round {at_round}: 4 of 6" in fleet.service.status()
        assert len(uploads_of(fleet, tap, "dev-00")) == before
        for hold in holds:
            tap.forgive(hold)
        records = fleet.run(100)
        assert [r["contributed"] for r in records] == [6] * len(norms)
        assert records[-1]["clusters"] == clusters
        if SHARDS > 1:
            # A permutation of the fleet's own decides which coordinates a worker adds up, so the last digit may differ.
            norms = [pytest.approx(every, rel=1e-6) for every in norms]
        assert [r["norms"] for r in records] == norms
        assert thetas(fleet) == models


@ONE_FILE
def test_death_before_commit_asks_again(tmp_path, undisturbed, tap):
    """Bytes in the file without a row are a torn tail: written over, acknowledged only when they are durable."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        fleet.broker.pump()
        for device in fleet.devices.values():
            device.worker.work()
        fleet.broker.pump()
        (file,) = (fleet.stage.aggregator_dir / "run-000001" / "updates").glob("*.f32")
        assert file.stat().st_size == 3 * 4 * fleet.plan.length
        fleet.kill_aggregator()
        assert not answers(fleet, tap, "dev-00")
        fleet.revive_aggregator()
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


@pytest.mark.parametrize(("victim", "steps"), DEATHS)
def test_a_party_may_die_at_any_step(tmp_path, undisturbed, victim, steps):
    with make_exact_fleet(tmp_path / "fleet", quorum=1.0) as fleet:
        for _ in range(steps):
            fleet.step()
        if victim == "aggregator":
            restart_aggregator(fleet, steps=1)
        else:
            restart_device(fleet, victim, steps=1)
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


def test_all_of_them_may_die_together(tmp_path, undisturbed):
    """A power cut takes the broker's memory, the aggregator and every device."""
    with make_exact_fleet(tmp_path / "fleet", quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 10)
        for name in tuple(fleet.devices):
            fleet.kill_device(name)
        fleet.kill_aggregator()
        restart(fleet.broker, keep=False)
        for name in reversed(fleet.stage.devices):
            fleet.revive_device(name)
        fleet.revive_aggregator()
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


LOSSES = {"upload": {"ending": "/up"}, "answer": {"ending": "/ctl", "hop": Hop.DOWN}, "nothing": {"times": 0}}


@pytest.mark.parametrize("lost", LOSSES)
def test_death_after_sealing_keeps_the_bytes(tmp_path, undisturbed, lost, tap):
    """If its upload was lost, the stored bytes are sent again; if not, a reminder, and the answer is repeated. It counts once."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        client = fleet.client_id("dev-01")
        silence = tap.lose(client=client, **LOSSES[lost])
        hold = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.settle()
        (first,) = uploads_of(fleet, tap, "dev-01")
        fleet.kill_device("dev-01")
        fleet.settle()
        tap.forgive(silence)
        fleet.revive_device("dev-01")
        fleet.settle()
        assert uploads_of(fleet, tap, "dev-01") == ([first, first] if lost == "upload" else [first])
        told = 1 if lost == "upload" else 2
        assert [c.action for c in answers(fleet, tap, "dev-01")][-told:] == [Action.ACK] * told
        tap.forgive(hold)
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


def test_death_before_sealing_repeats_work(tmp_path):
    """Mini-batch order follows from plan, round and name: the second life reaches the vector that the first would have."""
    vectors = []
    for die in (False, True):
        tap = Wiretap()
        with make_exact_fleet(tmp_path / str(die), faults=tap, local=QUICK) as fleet:
            fleet.broker.pump()
            if die:
                restart_device(fleet, "dev-01")
            fleet.settle()
            tap.rules.clear()
            fleet.run(100)
            vectors.append(thetas(fleet))
    assert vectors[0] == vectors[1]


@ONE_FILE
def test_altered_stored_update_is_noticed(tmp_path, tap):
    """An altered update on the aggregators disk is noticed."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.settle()
        fleet.kill_aggregator()
        (file,) = (fleet.stage.aggregator_dir / "run-000001" / "updates").glob("*.f32")
        raw = bytearray(file.read_bytes())
        raw[5] ^= 1
        file.write_bytes(raw)
        with pytest.raises(IntegrityError, match="altered or is torn"):
            fleet.revive_aggregator()


def test_mean_during_work_does_not_disturb(tmp_path):
    """A restarted aggregator seals the same mean again; the device continues with the model that it has."""
    with make_exact_fleet(tmp_path / "fleet", rounds=6) as fleet:
        device = next(iter(fleet.devices.values()))
        runtime, worker = device.runtime, device.worker
        fleet.run_until(lambda: fleet.closed() >= 2, 100)
        models = runtime._models
        fleet.run_until(lambda: runtime.session.round.stage is Stage.WORKING and models._fetch.used, 100)
        handed_back, results = [], runtime._hand_back
        runtime._hand_back = handed_back.append
        (theta,) = (state.theta.copy() for state in models.states.held.values())
        assert worker.work()
        runtime._hand_back = results
        for label in tuple(models._fetch.located):  # with workers one for each part
            models.take(label, b"another transfer", memoryview(b"the same mean, sealed again"))
        handed_back.pop()()
        np.testing.assert_array_equal(runtime._results._own.theta, theta)
        assert fleet.run(1000)[-1]["final"]
        assert len(set(thetas(fleet).values())) == 1


def test_round_after_deadline_is_found_again(tmp_path, monkeypatch, tap):
    """It does not follow from the uploads of the round before, and devices do no announced round twice."""

    class Crash(BaseException):
        pass

    with make_exact_fleet(tmp_path / "fleet", faults=tap, rounds=2, quorum=0.6, deadline_s=10.0) as fleet:
        tap.lose(client=fleet.client_id("dev-02"), ending="/up")
        keep = Store.snapshot

        def crash(store, round_, *args, **kwargs):
            if round_ == 2:
                raise Crash
            keep(store, round_, *args, **kwargs)

        monkeypatch.setattr(Store, "snapshot", crash)
        with pytest.raises(Crash):
            fleet.run(100)
        monkeypatch.undo()
        restart_aggregator(fleet)
        assert [r["contributed"] for r in fleet.run(200)] == [2, 2, 2]
