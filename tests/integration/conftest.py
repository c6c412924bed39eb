"""Real brokers, of both kinds, and clients for them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.address import BrokerAddress
from shoal.transport.base import Connected
from shoal.transport.local_broker import BrokerProcess, start_broker
from tests.helpers.mqtt_clients import BROKERS, Client


@pytest.fixture(scope="module", params=BROKERS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker of each kind for the tests that leave it running."""
    with start_broker(request.param, tmp_path_factory.mktemp(request.param)) as broker:
        yield broker


@pytest.fixture(params=BROKERS)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that the test may stop."""
    with start_broker(request.param, tmp_path) as broker:
        yield broker


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """A factory of started clients that are closed after the test."""
    made: list[Client] = []

    def make(url: str | BrokerAddress, name: str, *filters: str, start: bool = True, **options: object) -> Client:
        one = Client(url, name, **options)
        made.append(one)
        for topic_filter in filters:
            one.transport.subscribe(topic_filter)
        if start:
            one.transport.start(require=True)
            one.until(Connected)
        return one

    yield make
    for one in made:
        one.transport.close()
