"""Fleets at every broker that can be had here: a device is killed in the middle of a run and started again.

`.ci/brokers` installs the brokers and runs these tests. The default tests kill programs at mosquitto alone: test_faults.py.
"""

import signal

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from tests.helpers import waiting
from tests.helpers.forked_stages import ForkedStage
from tests.integration.other_brokers import missing, running

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.long]

KINDS = ("mosquitto", "bridged", "amqtt", "aedes", "rabbitmq", "ejabberd")
DEVICES = tuple(f"dev-{i}" for i in range(5))
INPUTS, CLASSES = 25_000, 3
"""The model's upload takes three chunks, and so does its mean."""
WAIT_S = 100.0
OPTIONS = Recipe(
    "fedavg",
    rounds=5,
    min_contributors=len(DEVICES),
    local=LocalTraining(epochs=1, batch_size=0, lr=0.1),
    quorum=1.0,
    deadline_s=600.0,
    seed=7,
)


@pytest.fixture
def addresses(kind, tmp_path):
    """The devices' and the aggregator's address of a broker."""
    reason = missing(kind)
    if reason:
        pytest.skip(reason)
    with running(kind, tmp_path / "broker") as found:
        yield found


def until(stage, reached, what):
    said = lambda: f"{what} not in {WAIT_S:g} s\n{stage.programs['aggregator'].tail(40)}"  # noqa: E731
    waiting.until(lambda: stage.check() or reached(), said, WAIT_S)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_mid_run(addresses, tmp_path, logistic):
    """The broker holds plan, roster, announcement and models before the devices come, and again when one comes back."""
    at_site, at_server = addresses
    data = tmp_path / "data.npz"
    rng = np.random.default_rng(1)
    np.savez(data, x=rng.normal(size=(20, INPUTS)).astype(np.float32), y=rng.integers(0, CLASSES, 20))
    bundle = logistic(INPUTS, CLASSES)
    server = {"SHOAL_AGGREGATOR_BROKER": at_server}
    with ForkedStage(tmp_path / "fleet", at_site, DEVICES, environment=server) as stage:
        plan = stage.add_run(bundle, rng.normal(size=(1, bundle.length)).astype(np.float32), OPTIONS)
        stage.start_aggregator()
        log = stage.log_of("aggregator")
        until(stage, lambda: "gathering" in log.read_text(), "the aggregator's wait for devices")
        for name in DEVICES:
            stage.start_device(name, data)
        until(stage, lambda: stage.closed(plan.run) >= 2, "the second round")
        stage.stop("dev-0", signal.SIGKILL)
        stage.start_device("dev-0", data)
        back_in = min(stage.closed(plan.run) + 2, OPTIONS.rounds - 1)
        until(stage, lambda: stage.closed(plan.run) >= back_in, "a round with the device that was killed")
        stage.stop("aggregator", signal.SIGKILL)
        stage.start_aggregator()
        records = stage.wait(plan.run, WAIT_S)
        assert records[-1]["final"]
        assert [r["contributed"] for r in records] == [len(DEVICES)] * (OPTIONS.rounds + 1)
