"""Real processes and signals: after any program is killed, the round completes and each update counts once.

Tests compare the final model with that of an undisturbed run of the same seed, bit for bit: a lost, doubled or changed
update would show.
"""

import dataclasses
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_client.storage.state import DeviceState
from shoal.protocol.documents import RunPlan
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.task.bundle import TaskBundle
from shoal.transport.local_broker import BrokerProcess, find_mosquitto, start_broker
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.process]

MOSQUITTO = pytest.param(
    "mosquitto", marks=pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
)
AMQTT = pytest.param("amqtt", marks=pytest.mark.long if find_mosquitto() else ())
"""Every fault on amqtt too, in the default tests only where there is no mosquitto."""
DEVICES = ("dev-0", "dev-1", "dev-2")
INPUTS, CLASSES = 12, 3
WIDE_INPUTS = 25_000
"""Inputs of a model whose upload takes three chunks."""
ROUNDS = 12
FROZEN_ROUND = 4
WAIT_S = 60.0
SEALED_WITHIN_S = 5.0
"""Devices that were told of a round have their updates ready by then."""
OPTIONS = Recipe(
    "fedavg",
    rounds=ROUNDS,
    local=LocalTraining(epochs=2, batch_size=8, lr=0.1),
    # Exact under any key: a rotation rounds differently in each run, and these models are compared bit by bit.
    mode="permutation",
    min_contributors=1,
    quorum=1.0,
    deadline_s=30.0,
    seed=7,
)


class Fleet:
    """A staged fleet of three devices, whose runs all end with the same model."""

    def __init__(self, root: Path, broker: BrokerProcess, bundle: TaskBundle, inputs: int = INPUTS) -> None:
        self.broker = broker
        self.bundle = bundle
        self.stage = ForkedStage(root / "fleet", broker.url, DEVICES)
        self.data = {}
        for i, name in enumerate(DEVICES):
            rng = np.random.default_rng(i)
            self.data[name] = root / f"{name}.npz"
            np.savez(
                self.data[name], x=rng.normal(size=(60, inputs)).astype(np.float32), y=rng.integers(0, CLASSES, 60)
            )
        self.origins = np.random.default_rng(3).normal(size=(1, bundle.length)).astype(np.float32)

    def add_run(self, options: Recipe = OPTIONS) -> RunPlan:
        return self.stage.add_run(self.bundle, self.origins, options)

    def start(self) -> None:
        self.stage.start_aggregator()
        for name in DEVICES:
            self.start_device(name)

    def start_device(self, name: str) -> None:
        self.stage.start_device(name, self.data[name])

    def signal(self, name: str, number: signal.Signals) -> None:
        self.stage.programs[name].process.send_signal(number)

    def kill(self, name: str) -> None:
        self.stage.stop(name, signal.SIGKILL)

    def stored(self, run: int, round_: int) -> set[str]:
        """Return the devices whose upload of a round is durable."""
        path = self.stage.aggregator_dir / f"run-{run:06d}" / "run.sqlite"
        if not path.exists():
            return set()
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
        try:
            return {d for (d,) in database.execute("SELECT device FROM uploads WHERE round = ?", (round_,))}
        except sqlite3.OperationalError:
            return set()
        finally:
            database.close()

    def open_round(self, run: int) -> int:
        records = self.stage.records(run)
        return (records[-1]["round"] if records else 0) + 1

    def model(self, plan: RunPlan) -> np.ndarray:
        """Return the run's final model (d,) float32, which all devices hold with the same bits."""
        models = [DeviceState(self.stage.device_dir(name)).load_model() for name in self.stage.devices]
        assert {model.run for model in models} == {plan.run}
        assert len({model.theta.tobytes() for model in models}) == 1
        return models[0].theta

    def check_rounds(self, plan: RunPlan) -> None:
        """Every round has exactly one contribution of every device."""
        records = self.stage.records(plan.run)
        assert [r["round"] for r in records] == list(range(1, ROUNDS + 2))
        assert {(r["ordered"], r["contributed"]) for r in records} == {(3, 3)}

    def finish(self, plan: RunPlan) -> np.ndarray:
        self.stage.wait(plan.run, WAIT_S)
        self.check_rounds(plan)
        return self.model(plan)


@pytest.fixture(scope="module", params=[MOSQUITTO, AMQTT])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, logistic: Callable[..., TaskBundle]
):
    """Programs that each test starts again which it has killed; uploads of three chunks on mosquitto, of one on amqtt."""
    root, inputs = tmp_path_factory.mktemp("fleet"), WIDE_INPUTS if request.param == "mosquitto" else INPUTS
    with start_broker(request.param, root / "broker") as broker:
        made = Fleet(root, broker, logistic(inputs, CLASSES), inputs)
        with made.stage:
            made.start()
            yield made


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> np.ndarray:
    """The model of a run in which nothing happened."""
    return fleet.finish(fleet.add_run())


def frozen_run(fleet: Fleet, name: str, options: Recipe = OPTIONS) -> tuple[RunPlan, int]:
    """Begin a run and stop the process ``name`` in the middle; return the plan, and the round that can't close any more.

    A run may be over before its process is stopped: then another one begins.
    """
    for _ in range(ROUNDS):
        plan = fleet.add_run(options)
        until(lambda run=plan.run: fleet.open_round(run) >= FROZEN_ROUND, "a round to disturb", pause_s=0.005)
        fleet.signal(name, signal.SIGSTOP)
        time.sleep(0.3)
        round_ = fleet.open_round(plan.run)
        if round_ <= ROUNDS:
            return plan, round_
        fleet.signal(name, signal.SIGCONT)
    pytest.fail("every run was over before its process was stopped")


def frozen_in_mid_upload(fleet: Fleet) -> RunPlan:
    """Stop the aggregator when every device has an update for it; return the plan of the run.

    It may be stopped after a round was closed and before the next was announced: then it is let go, and another run begins.
    """
    for _ in range(ROUNDS):
        plan, round_ = frozen_run(fleet, "aggregator")
        end = time.monotonic() + SEALED_WITHIN_S
        while time.monotonic() < end:
            sealed = [DeviceState(fleet.stage.device_dir(d)).pending.load().mark.round for d in DEVICES]
            if min(sealed) >= round_ or fleet.stored(plan.run, round_):
                return plan
            time.sleep(0.005)
        fleet.signal("aggregator", signal.SIGCONT)
        fleet.stage.wait(plan.run, WAIT_S)
    pytest.fail("the aggregator was never stopped with updates under way")


def test_aggregator_killed_with_some_uploads(fleet: Fleet, undisturbed: np.ndarray) -> None:
    """The durable updates of the open round are not asked for again, and not lost."""
    plan, _ = frozen_run(fleet, "dev-1")
    until(lambda: {"dev-0", "dev-2"} <= fleet.stored(plan.run, fleet.open_round(plan.run)), "two durable updates")
    fleet.kill("aggregator")
    fleet.signal("dev-1", signal.SIGCONT)
    fleet.stage.start_aggregator()
    np.testing.assert_array_equal(fleet.finish(plan), undisturbed)


def test_broker_killed_in_mid_upload(fleet: Fleet, undisturbed: np.ndarray) -> None:
    """Messages that the broker acknowledged and lost are sent again."""
    plan = frozen_in_mid_upload(fleet)
    fleet.broker.kill()
    fleet.signal("aggregator", signal.SIGCONT)
    time.sleep(0.2)
    fleet.broker.stop()
    fleet.broker.start()
    np.testing.assert_array_equal(fleet.finish(plan), undisturbed)


def test_device_killed_unacknowledged(fleet: Fleet, undisturbed: np.ndarray) -> None:
    """A restarted device sends the bytes that it had sealed."""
    plan, _ = frozen_run(fleet, "aggregator")
    fleet.kill("dev-2")
    fleet.signal("aggregator", signal.SIGCONT)
    time.sleep(0.3)
    fleet.start_device("dev-2")
    np.testing.assert_array_equal(fleet.finish(plan), undisturbed)


def test_dead_device_does_not_stall_round(fleet: Fleet) -> None:
    """With a quorum below 1 the round closes without a device that is offline, and records it."""
    plan, round_ = frozen_run(fleet, "dev-0", dataclasses.replace(OPTIONS, quorum=0.6))
    fleet.kill("dev-0")
    records = fleet.stage.wait(plan.run, WAIT_S)
    fleet.start_device("dev-0")
    assert records[-1]["final"]
    without = [r for r in records if r["round"] >= round_]
    assert without[0]["missing"] == ["dev-0"]
    assert {r["contributed"] for r in without} == {2}


def test_everything_stops_and_starts_again(fleet: Fleet, undisturbed: np.ndarray) -> None:
    """SIGTERM is a clean stop for every program; the run resumes."""
    plan, _ = frozen_run(fleet, "dev-0")
    fleet.signal("dev-0", signal.SIGCONT)
    codes = {name: fleet.stage.stop(name) for name in ("dev-0", "aggregator", "dev-1", "dev-2")}
    assert set(codes.values()) == {0}
    fleet.start()
    np.testing.assert_array_equal(fleet.finish(plan), undisturbed)
