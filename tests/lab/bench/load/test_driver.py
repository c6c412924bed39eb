"""The driver of many device runtimes: cheap gradients, the queue of trainings, counts, and its end."""

import dataclasses
import json
import signal
import types

import numpy as np
import pytest
from shoal_lab.bench.load import driver as load_driver
from shoal_lab.bench.load.driver import (
    GROUPS,
    SAMPLES,
    SPREAD,
    TARGET_NORM,
    Driver,
    DriverReport,
    DriverSpec,
    LoadTransport,
    LoadWorker,
    Pull,
    Trainings,
    batch_of,
    ended_by_signal,
    member_like,
    scale_of,
    target_of,
)

from crypto.seal.identity import Identity
from edge_client import membership as enrolment
from shoal.errors import UntrustedError
from shoal.membership.directory import KEY_FILE
from shoal.protocol.chunking import ChunkKind, split
from shoal.transport.base import Connected, Message, TakenOver
from tests.helpers.tasks import logistic_bundle, manifest

D = 50
BIRTH = 3


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


def test_targets_are_the_same_in_every_process_and_differ_between_groups():
    assert target_of(2, D).tolist() == target_of(2, D).tolist()
    targets = [target_of(group, D) for group in range(GROUPS)]
    assert [t.dtype for t in targets] == [np.float32] * GROUPS
    np.testing.assert_allclose([np.linalg.norm(t) for t in targets], TARGET_NORM, rtol=1e-6)
    cosines = [targets[0] @ t / TARGET_NORM**2 for t in targets[1:]]
    assert max(cosines) < 0.7


def test_scales_stay_within_their_spread():
    scales = [scale_of(place) for place in range(2000)]
    assert min(scales) >= 1.0
    assert max(scales) < 1.0 + SPREAD


def test_samples_have_the_tasks_shapes_and_nothing_is_predicted():
    batch = batch_of(manifest())
    assert (batch.x.shape, batch.x.dtype) == ((SAMPLES, 4), np.float32)
    assert (batch.y.shape, batch.y.dtype) == ((SAMPLES,), np.int64)
    assert Pull(target_of(0, D), 1.0).predict(np.zeros(D, np.float32), batch.x).shape == (SAMPLES, 1)


def test_a_cancelled_training_is_taken_off_the_queue_and_not_counted():
    trainings, done = Trainings(lambda: 0.0), []
    worker = LoadWorker(trainings)
    worker.cancel()
    worker.submit(lambda _cancelled: 1, done.append)
    worker.close()
    assert trainings.run_due()
    assert not trainings.run_due()
    assert (done, trainings.carried_out) == ([], 0)


def test_a_training_waits_until_it_is_due():
    trainings, done = Trainings(lambda: 60.0), []
    trainings.add(lambda _cancelled: 1, done.append)
    assert not trainings.run_due()
    assert trainings.wait_s() == load_driver.POLL_S
    assert done == []


def test_reminders_are_counted_and_other_messages_are_not(monkeypatch):
    sent = []
    monkeypatch.setattr(load_driver.MqttTransport, "publish", lambda _self, topic, *_a, **_k: sent.append(topic))
    transport = LoadTransport.__new__(LoadTransport)
    for kind in (ChunkKind.REMINDER, ChunkKind.UPLOAD, ChunkKind.REMINDER, ChunkKind.STATE):
        (chunk,) = split(b"x", kind=kind, round=1)
        transport.publish(kind.name, chunk)
    assert transport.reminders == 2
    assert sent == ["REMINDER", "UPLOAD", "REMINDER", "STATE"]


@pytest.fixture
def driver():
    """A driver of two devices that has not connected."""
    spec = DriverSpec(devices="d", joined="dev-a", names=["dev-a", "dev-b"], first=7, report="r", spread_s=0.0)
    made = Driver(DriverSpec(**json.loads(json.dumps(dataclasses.asdict(spec)))))
    made.events = [[], []]
    made.closed, made._connecting = [], {0, 1}
    for place, log in enumerate(made.events):
        transport = types.SimpleNamespace(reminders=(1, 4)[place])
        runtime = types.SimpleNamespace(
            on_event=lambda event, _now, log=log: log.append(event),
            nacks=2,
            close=lambda place=place: made.closed.append(place),
        )
        made._present[place] = load_driver._Present(BIRTH, transport, runtime)
    return made


def test_events_reach_their_own_device_in_order(driver):
    first, second = Message("t", b"1"), Message("t", b"2")
    for item in ((1, Connected(session_present=False)), (0, first), (1, second)):
        driver._inbox.put((item[0], BIRTH, item[1]))
    assert driver._take()
    assert driver.events == [[first], [Connected(session_present=False), second]]
    assert driver._connecting == {0}


def test_events_of_a_device_that_has_left_go_to_nobody(driver):
    driver._inbox.put((0, BIRTH - 1, Message("t", b"1")))
    del driver._present[1]
    driver._inbox.put((1, BIRTH, Message("t", b"2")))
    assert driver._take()
    assert driver.events == [[], []]


def test_at_each_signal_a_share_leaves_and_those_that_left_before_return(driver, monkeypatch):
    opened = []
    monkeypatch.setattr(driver, "_open", opened.append)
    driver._connecting.clear()
    driver._spec = dataclasses.replace(driver._spec, churn=0.5)
    driver.churn()
    assert driver._take()
    (left,) = driver.closed
    assert (opened, driver._present.keys()) == ([], {1 - left})
    driver.churn()
    assert driver._take()
    assert opened == [left]
    assert driver.closed == [left, 1 - left]
    assert (driver.report().nacks, driver.report().reminders) == (4, 5), "of those that have left too"


def test_without_an_event_a_driver_goes_on_and_a_stop_ends_it(driver, monkeypatch):
    monkeypatch.setattr(load_driver, "POLL_S", 0.001)
    assert driver._take()
    driver._inbox.put((0, BIRTH, Message("t", b"1")))
    driver.stop()
    assert not driver._take()
    assert len(driver.events[0]) == 1, "events before the stop are handed over"


def test_another_bench_with_the_same_ids_is_named(driver):
    """Two of them would disconnect each other without end."""
    driver._inbox.put((1, BIRTH, TakenOver()))
    with pytest.raises(UntrustedError, match="another client uses the id of dev-b") as caught:
        driver._take()
    assert caught.value.hint == "end the other load bench first"


def test_the_report_sums_over_devices(driver):
    driver._trainings.carried_out = 9
    report = driver.report()
    assert (report.uploads, report.nacks, report.reminders) == (9, 4, 5)
    assert report.cpu_s > 0
    assert DriverReport(**json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_devices_of_a_group_pull_towards_one_target_each_at_its_own_scale(driver):
    bundle = logistic_bundle()
    zero = np.zeros(bundle.length, np.float32)
    gradients = [driver._pull(place, bundle).grad(zero, None, None)[1] for place in (0, GROUPS, 1)]
    np.testing.assert_allclose(gradients[1] / scale_of(GROUPS), gradients[0] / scale_of(0), rtol=1e-5)
    assert not np.allclose(gradients[2] / scale_of(1), gradients[0] / scale_of(0))
    assert len(driver._targets) == 2, "drawn once a group"


def test_sigterm_stops_and_sigint_is_left_to_the_parent():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stopped = []
    try:
        with ended_by_signal(lambda: stopped.append(1)):
            signal.raise_signal(signal.SIGINT)
            assert stopped == []
            signal.raise_signal(signal.SIGTERM)
            assert stopped == [1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
