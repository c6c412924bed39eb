"""The bench's reader of the fleet page."""

import time

from shoal_lab.bench.load import page_reader
from shoal_lab.bench.load.page_reader import PageReader

from shoal.transport.local_broker import free_port
from tests.helpers.pages import PagePlace, names


def wait_for(reached):
    end_s = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_it_follows_the_events_and_scrapes_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(page_reader, "SCRAPE_S", 0.02)
    place = PagePlace(tmp_path, names(3))
    with PageReader(place.server.port) as reader, place:
        place.publish()
        wait_for(lambda: reader.events >= 1 and reader.scrapes >= 3)
        place.publish(received=1)
        wait_for(lambda: reader.events >= 2)


def test_a_page_that_is_not_there_yet_is_waited_for(monkeypatch):
    monkeypatch.setattr(page_reader, "SCRAPE_S", 0.01)
    with PageReader(free_port()) as reader:
        time.sleep(0.05)
    assert (reader.events, reader.scrapes) == (0, 0)
