"""The driver of many device runtimes: cheap gradients, the queue of trainings, counts, and its end."""

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
    LoadTransport,
    LoadWorker,
    Pull,
    Trainings,
    batch_of,
    scale_of,
    target_of,
)

from shoal.errors import UntrustedError
from shoal.protocol.chunking import ChunkKind, split
from shoal.transport.base import Connected, Message, TakenOver
from tests.helpers.tasks import logistic_bundle, manifest

D = 50
BIRTH = 3


def test_no_two_devices_send_the_same_update():
    scales = {scale_of(place) for place in range(2000)}
    assert len(scales) == 2000
    assert 1.0 <= min(scales) < max(scales) < 1.0 + SPREAD


def test_gradients_lead_to_target_of_a_group():
    """Targets are of one length and differ; the score of the nearest model is the best; nothing is predicted."""
    theta, target, y = np.zeros(D, np.float32), target_of(1, D), np.zeros(4)
    backend, batch = Pull(target, 1.0), batch_of(manifest())
    loss, gradient = backend.grad(theta, None, y)
    assert loss == pytest.approx(0.5 * TARGET_NORM**2, rel=1e-5)
    np.testing.assert_allclose(theta - gradient, target, rtol=1e-6)
    targets = [target_of(group, D) for group in range(GROUPS)]
    np.testing.assert_allclose([np.linalg.norm(t) for t in targets], TARGET_NORM, rtol=1e-6)
    assert max(targets[0] @ t / TARGET_NORM**2 for t in targets[1:]) < 0.7
    near, far = (backend.score(one, None, y) for one in (target, targets[0]))
    assert near.mean_loss < far.mean_loss
    assert far.correct < near.correct == near.count == 4
    assert (batch.x.shape, batch.x.dtype, batch.y.shape) == ((SAMPLES, 4), np.float32, (SAMPLES,))
    assert backend.predict(theta, batch.x).shape == (SAMPLES, 1)


def test_trainings_run_when_they_are_due():
    delays, done = iter((0.02, 0.0, 0.01, 60.0)), []
    trainings = Trainings(lambda: next(delays))
    for number in range(3):
        LoadWorker(trainings).submit(lambda _cancelled, n=number: n, done.append)
    while len(done) < 3:
        assert 0.0 <= trainings.wait_s() <= load_driver.POLL_S
        trainings.run_due()
    LoadWorker(trainings).submit(lambda _cancelled: 3, done.append)
    assert not trainings.run_due()
    assert trainings.wait_s() == load_driver.POLL_S
    assert (done, trainings.carried_out) == ([1, 2, 0], 3)


@pytest.mark.parametrize(
    "end", [lambda worker: worker.submit(lambda _cancelled: 2, worker.done.append), LoadWorker.close]
)
def test_a_cancelled_training_is_not_counted(end):
    """The next one of its device cancels it, and so does the end."""
    trainings, done = Trainings(lambda: 0.0), []
    worker = LoadWorker(trainings)
    worker.done = done
    worker.cancel()
    worker.submit(lambda _cancelled: 1, done.append)
    end(worker)
    while trainings.run_due():
        pass
    assert done == [2] * trainings.carried_out
    assert trainings.carried_out == (end is not LoadWorker.close)


def test_reminders_are_counted(monkeypatch):
    sent = []
    monkeypatch.setattr(load_driver.MqttTransport, "publish", lambda _self, topic, *_a, **_k: sent.append(topic))
    transport = LoadTransport.__new__(LoadTransport)
    for kind in (ChunkKind.REMINDER, ChunkKind.UPLOAD, ChunkKind.REMINDER, ChunkKind.STATE):
        transport.publish(kind.name, split(b"x", kind=kind, round=1)[0])
    assert transport.reminders == 2
    assert sent == ["REMINDER", "UPLOAD", "REMINDER", "STATE"]


@pytest.fixture
def driver(monkeypatch):
    """A driver of two devices that has not connected."""
    monkeypatch.setattr(load_driver, "POLL_S", 0.001)
    spec = {"devices": "d", "joined": "dev-a", "names": ["dev-a", "dev-b"], "first": 7, "spread_s": 0.0, "churn": 0.5}
    made = Driver(types.SimpleNamespace(**spec))
    made.events, made.closed, made._connecting = [[], []], [], {0, 1}
    for place, log in enumerate(made.events):
        runtime = types.SimpleNamespace(
            on_event=lambda event, _now, log=log: log.append(event),
            nacks=2,
            close=lambda place=place: made.closed.append(place),
        )
        transport = types.SimpleNamespace(reminders=(1, 4)[place])
        made._present[place] = load_driver._Present(BIRTH, transport, runtime)
    return made


def test_devices_of_a_group_share_a_target(driver):
    """Each at its own scale; a target is drawn once a group."""
    bundle = logistic_bundle()
    zero = np.zeros(bundle.length, np.float32)
    gradients = [driver._pull(place, bundle).grad(zero, None, None)[1] for place in (0, GROUPS, 1)]
    np.testing.assert_allclose(gradients[1] / scale_of(GROUPS), gradients[0] / scale_of(0), rtol=1e-5)
    assert not np.allclose(gradients[2] / scale_of(1), gradients[0] / scale_of(0))
    assert len(driver._targets) == 2


def test_events_reach_their_device_in_order(driver):
    """Those of a device that has left go to nobody; after a stop nothing is taken."""
    first, second, connected = Message("t", b"1"), Message("t", b"2"), Connected(session_present=False)
    assert driver._take(), "without an event it goes on"
    for place, birth, event in ((1, BIRTH, connected), (0, BIRTH, first), (0, BIRTH - 1, second), (1, BIRTH, second)):
        driver._inbox.put((place, birth, event))
    driver.stop()
    driver._inbox.put((0, BIRTH, second))
    assert not driver._take()
    assert driver.events == [[first], [connected, second]]
    assert driver._connecting == {0}


def test_a_share_leaves_and_returns(driver, monkeypatch):
    """At each signal; the report counts those that have left too."""
    opened = []
    monkeypatch.setattr(driver, "_open", opened.append)
    driver._connecting.clear()
    driver.churn()
    assert driver._take()
    (left,) = driver.closed
    assert (opened, driver._present.keys()) == ([], {1 - left})
    driver.churn()
    assert driver._take()
    assert (opened, driver.closed) == ([left], [left, 1 - left])
    assert driver.report() == {"uploads": 0, "nacks": 4, "reminders": 5}


def test_another_bench_of_same_ids_is_named(driver):
    """Two of them would disconnect each other without end."""
    driver._inbox.put((1, BIRTH, TakenOver()))
    with pytest.raises(UntrustedError, match="another client uses the id of dev-b") as caught:
        driver._take()
    assert caught.value.hint == "end the other load bench first"
