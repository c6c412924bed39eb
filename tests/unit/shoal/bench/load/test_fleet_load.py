"""Parts of the load bench: cheap gradients, the queue of trainings, prepared files and soaks."""

import resource

import numpy as np
import pytest

from aggregator.storage.run_status import rounds_closed, uploads_stored
from crypto.seal.identity import Identity
from edge_client import membership as enrolment
from shoal.bench.load import driver as load_driver
from shoal.bench.load import fleet_load as load
from shoal.bench.load.driver import LoadWorker, Pull, Trainings, member_like, scale_of, target_of
from shoal.bench.load.replay import Item, read_items, write_item
from shoal.bench.load.soak import SoakFigures, SoakSample, is_flat
from shoal.errors import ConfigError, UsageError
from shoal.membership.directory import KEY_FILE
from tests.helpers.trees import python

D = 50


def test_a_gradient_step_of_length_one_reaches_the_target():
    theta, target = np.zeros(D, np.float32), target_of(1, D)
    loss, gradient = Pull(target, 1.0).grad(theta, None, np.zeros(3))
    assert loss == pytest.approx(0.5 * load_driver.TARGET_NORM**2, rel=1e-5)
    np.testing.assert_allclose(theta - gradient, target, rtol=1e-6)


def test_the_score_of_the_nearest_model_is_the_best():
    backend, y = Pull(target_of(0, D), 1.0), np.zeros(4)
    near, far = (backend.score(theta, None, y) for theta in (target_of(0, D), target_of(1, D)))
    assert near.mean_loss < far.mean_loss
    assert (near.correct, near.count) == (4, 4)
    assert far.correct < near.correct


def test_no_two_devices_of_a_fleet_send_the_same_update():
    assert len({scale_of(place) for place in range(2000)}) == 2000


def test_trainings_run_in_the_order_in_which_they_are_due():
    delays, done = iter((0.02, 0.0, 0.01)), []
    trainings = Trainings(lambda: next(delays))
    for number in range(3):
        trainings.add(lambda _cancelled, n=number: n, done.append)
    while len(done) < 3:
        assert 0.0 <= trainings.wait_s() <= load_driver.POLL_S
        trainings.run_due()
    assert done == [1, 2, 0]
    assert trainings.carried_out == 3
    assert not trainings.run_due()


def test_a_worker_cancels_the_training_before_the_one_that_it_takes():
    trainings, done = Trainings(lambda: 0.0), []
    worker = LoadWorker(trainings)
    worker.submit(lambda _cancelled: 1, done.append)
    worker.submit(lambda _cancelled: 2, done.append)
    while trainings.run_due():
        pass
    assert done == [2]
    assert trainings.carried_out == 1


def test_a_device_without_files_of_its_own_has_the_grant_of_the_one_that_joined(tmp_path):
    from aggregator import membership as aggregators
    from shoal.owner.keys.directory import FleetDirectory

    fleet = FleetDirectory.create(tmp_path / "owner", "load", "mqtt://127.0.0.1:1")
    fleet.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    cards = [enrolment.init(tmp_path / name, name).read_bytes() for name in ("dev-a", "dev-b")]
    fleet.add_devices(cards)
    joined = enrolment.join(tmp_path / "dev-a", fleet.add_device(cards[0]).read_bytes(), fleet.fingerprint)
    other = member_like(joined, tmp_path / "dev-b")
    assert (joined.name, joined.index, other.name, other.index) == ("dev-a", 0, "dev-b", 1)
    assert other.identity.member == Identity.load(tmp_path / "dev-b" / KEY_FILE).member
    assert other.group == joined.group


def test_prepared_messages_come_back_from_their_file(tmp_path):
    items = [Item(f"dev-{n}", bytes([n]) * 16, b"x" * 1000 * n) for n in range(4)]
    with (tmp_path / "round").open("wb") as file:
        for item in items:
            write_item(file, item)
    assert list(read_items(tmp_path / "round")) == items


def test_a_hard_limit_that_is_too_low_is_named(monkeypatch):
    monkeypatch.setattr(load, "raise_open_files", lambda: 1024)
    with pytest.raises(ConfigError, match="1564 open files") as failed:
        load._check_open_files(1500)
    assert "ulimit" in failed.value.hint


def test_more_devices_than_a_roster_takes_are_refused():
    with pytest.raises(UsageError, match="65534"):
        load._check_open_files(70_000)


def test_raising_the_soft_limit_leaves_the_hard_one(monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, pair: set_to.append(pair))
    assert load_driver.raise_open_files() == 4096
    assert set_to == [(4096, 4096)]


def test_a_run_that_has_no_directory_yet_has_no_rounds(tmp_path):
    assert (rounds_closed(tmp_path), uploads_stored(tmp_path, 1)) == (0, 0)


def soak_of(database_bytes):
    samples = [
        SoakSample(
            at_s=60.0 * n,
            closed=100 * n,
            rss_mb=60.0,
            open_files=20,
            database_bytes=database_bytes(n),
            aggregator_cpu_s=0.5 * n,
        )
        for n in range(12)
    ]
    return SoakFigures(
        devices=30, algorithm="fedavg", model_bytes=400, samples=tuple(samples), nacks=0, reminders=0
    ).data()


def test_a_soak_tells_a_database_that_grows_from_one_that_does_not():
    flat, growing = soak_of(lambda _n: 200_000), soak_of(lambda n: 200_000 * (n + 1))
    assert flat["flat"] == dict.fromkeys(flat["flat"], True)
    assert [name for name, is_so in growing["flat"].items() if not is_so] == ["database_bytes"]
    assert flat["first_third"]["seconds_per_round"] == pytest.approx(0.6)
    assert flat["last_third"]["aggregator_cpu_s_per_round"] == pytest.approx(0.005)
    assert (flat["rounds"], flat["minutes"]) == (1100, 11.0)


def test_the_record_of_each_round_may_grow_the_database():
    """35 bytes a round are the run's record; 1,000 would be client updates that nothing deletes."""
    record, updates = (soak_of(lambda n, size=size: 2_000_000 + 100 * n * size)["flat"] for size in (35, 10_000))
    assert record["database_bytes"]
    assert not updates["database_bytes"]


def test_a_figure_may_rise_by_a_tenth_and_its_slack():
    assert is_flat("rss_mb", 60.0, 67.9)
    assert not is_flat("rss_mb", 60.0, 68.1)


def test_the_help_of_bench_aggregator_says_what_it_leaves_out():
    shown = " ".join(python("from shoal.cli import main; main()", "bench", "aggregator", "--help").stdout.split())
    assert "leaves out the daemon's event queue, MQTT and the broker, acknowledgements on the wire" in shown
