"""One real Chromium for all tests here; without it they are skipped, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

from tests.browser import browsers
from tests.helpers.pages import PagePlace, names

MISSING = [
    name
    for name, there in (
        ("chromium (apt install chromium chromium-driver)", browsers.CHROMIUM and browsers.DRIVER),
        ("selenium (pip install selenium)", importlib.util.find_spec("selenium")),
    )
    if not there
]


@pytest.fixture(scope="session")
def browser():
    if MISSING:
        pytest.skip(f"these tests need {' and '.join(MISSING)}")
    with browsers.chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def hundred(tmp_path_factory, browser):
    """Return a page of 100 devices after 30 rounds, one of them offline and one whose data do not fit."""
    with PagePlace(tmp_path_factory.mktemp("hundred"), names(100)) as place:
        place.close_rounds(11)
        place.close_rounds(2, missing=["dev-007", "dev-042"], declined={"dev-042": "data"})
        place.close_rounds(17)
        impaired(place)
        yield place


def impaired(place, **options):
    place.publish(
        received=63,
        changes={"dev-007": {"online": False, "since_s": 1_800_000_000}, "dev-042": {"declined": "data"}},
        **options,
    )
