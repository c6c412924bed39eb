"""The fleet page in a real Chromium: every view at two widths, dark and light, by keyboard, live, hostile, and cut off."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest

from aggregator.storage.store import Store
from shoal.page.history import RunHistory, history_of
from shoal.page.page import write_still
from shoal.protocol.messages import Vitals
from tests.browser.browsers import complaints, look, requested
from tests.browser.conftest import impaired
from tests.helpers.pages import NOW_S, PagePlace, names, record
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

VIEWS = ("state", "devices", "clusters", "learning", "likeness", "participation", "traffic")
WIDTHS = (360, 1600)
IN_VIEW = "const b = document.getElementById(arguments[0]).getBoundingClientRect(); return b.top < innerHeight && b.bottom > 0"
ALL_BUILT = "return [...document.querySelectorAll('details')].every((d) => d.children.length === 2)"
AUDIT = (ROOT / "tests" / "helpers" / "audit.js").read_text()
PICTURES = os.environ.get("SHOAL_SCREENSHOTS", "")
"""Folder to which `make screenshots` lets these tests write the documents' pictures."""
FIRST_PAGE_PIXELS = 1500
"""Of the picture on the project's first page: down to the tree of clusters and its table."""
HOSTILE = '<img src=x onerror="document.title=1"></script><script>document.title=1</script>'


def text_of(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def active(browser):
    return browser.execute_script(
        "const e = document.activeElement; return [e.tagName, e.id, e.getAttribute('href') || '']"
    )


def keys(browser, *pressed):
    from selenium.webdriver import ActionChains

    chain = ActionChains(browser)
    for key in pressed:
        chain.send_keys(key)
    chain.perform()


def take_picture(browser, name, most=math.inf):
    """Write a picture of the page, of its first ``most`` pixels, for the documents, if they are wanted."""
    if not PICTURES:
        return
    browser.execute_script("scrollTo(0, 0)")
    until(lambda: browser.execute_script("return document.querySelector('#views a').hasAttribute('aria-current')"))
    size = browser.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    shot = {"captureBeyondViewport": True, "clip": {**size, "height": min(size["height"], most), "scale": 1}}
    data = browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
    (Path(PICTURES) / f"{name}.png").write_bytes(base64.b64decode(data))


@pytest.fixture
def quiet(browser):
    """Let a test fail if the console complains, or anybody but the page's own server is asked."""
    browser.get("about:blank")
    complaints(browser)
    requested(browser)
    yield
    assert complaints(browser) == []
    others = [u for u in requested(browser) if not u.startswith(("http://127.0.0.1:", "file:///", "data:,", "about:"))]
    assert others == []


# ------------------------------------------------------------------------------------------------ the views


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_is_readable(browser, hundred, width, dark):
    look(browser, width=width, dark=dark)
    browser.get(hundred.url)
    until(lambda: "Live" in text_of(browser, "#feed"))
    assert text_of(browser, "#verdict h3") == "2 devices can't take part"
    for view in VIEWS:
        browser.execute_script("document.querySelector(`#views a[href='#${arguments[0]}']`).click()", view)
        until(lambda view=view: browser.execute_script(IN_VIEW, view))
        assert len(text_of(browser, f"#{view}")) > 60
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    until(lambda: browser.execute_script(ALL_BUILT))
    assert browser.execute_script(AUDIT) == []
    browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    take_picture(browser, f"fleet-page-{width}-{'dark' if dark else 'light'}")
    if (width, dark) == (1600, False):
        take_picture(browser, "fleet-page", most=FIRST_PAGE_PIXELS)


@pytest.mark.usefixtures("quiet")
def test_figures_of_100_devices_are_there(browser, hundred):
    """The figures of a hundred devices are there."""
    look(browser, width=1600)
    browser.get(hundred.url)
    tiles = text_of(browser, "#tiles")
    assert "30 of 60" in tiles
    assert "99 of 100" in tiles
    assert "25 + 25 + 25 + 25 devices" in tiles
    assert "worst 75.0 % (dev-000), spread 0 points" in tiles
    assert "Within clusters the mean cosine is 0.7" in text_of(browser, "#cosines")
    assert len(browser.execute_script("return document.querySelectorAll('#device-table tbody tr')")) == 100
    first = text_of(browser, "#device-table tbody tr")
    assert "dev-007" in first or "dev-042" in first
    keys_of_tree = browser.execute_script("return document.querySelector('#tree svg').getAttribute('aria-label')")
    assert "100 devices are in 4 clusters, unchanged since round 14" in keys_of_tree


@pytest.mark.usefixtures("quiet")
def test_devices_are_found_by_name_or_reason(browser, hundred):
    """Devices are found by name and by having a reason."""
    look(browser, width=360)
    browser.get(hundred.url)
    shown = lambda: browser.execute_script(  # noqa: E731
        "return [...document.querySelectorAll('#device-table tbody th')].map((e) => e.textContent)"
    )
    browser.find_element("id", "find").send_keys("DEV-01")
    assert shown() == [f"dev-01{i}" for i in range(10)]
    browser.find_element("id", "find").clear()
    browser.find_element("id", "find").send_keys("x")
    assert text_of(browser, "#device-rows") == "No device fits."
    browser.find_element("id", "find").send_keys("\b")
    browser.execute_script("document.getElementById('only').click()")
    assert shown() == ["dev-007", "dev-042"]
    assert "start it with data that fit" in text_of(browser, "#device-rows")


# ------------------------------------------------------------------------------------------------ keyboard, theme


@pytest.mark.usefixtures("quiet")
def test_keyboard_reaches_everything(browser, hundred):
    """Everything is reached and read by keyboard."""
    from selenium.webdriver.common.keys import Keys

    look(browser, width=1600)
    browser.get(hundred.url)
    until(lambda: "Live" in text_of(browser, "#feed"))
    keys(browser, Keys.TAB)
    assert active(browser) == ["A", "", "#main"]
    keys(browser, Keys.ENTER)
    assert active(browser)[:2] == ["MAIN", "main"]
    browser.execute_script("document.activeElement.blur(); document.querySelector('.skip').focus()")
    visited = []
    for _ in range(60):
        keys(browser, Keys.TAB)
        at = active(browser)
        if at[0] == "BODY":
            break
        visited.append(at)
        ring = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none", at
    hrefs = [href for tag, _, href in visited if tag == "A"]
    assert [h for h in hrefs if h.startswith("#")][: len(VIEWS)] == [f"#{view}" for view in VIEWS]
    assert {"theme", "matrix", "find", "only"} <= {name for _, name, _ in visited}
    assert sum(tag == "SUMMARY" for tag, _, _ in visited) >= 6

    browser.execute_script("document.querySelector('#loss .plot').focus()")
    keys(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.END)
    assert text_of(browser, "#loss .readout").startswith("round 30: cluster 0")
    assert text_of(browser, "#spoken").startswith("round 30: cluster 0")
    browser.execute_script("document.querySelector('#cosines .plot').focus()")
    keys(browser, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert " and " in text_of(browser, "#cosines .readout")
    browser.execute_script("document.querySelector('#marks .plot').focus()")
    keys(browser, Keys.HOME)
    assert "round 1: uploaded" in text_of(browser, "#marks .readout")
    browser.execute_script("document.querySelector('#tree summary').focus()")
    keys(browser, Keys.ENTER)
    until(lambda: "14 to 30" in text_of(browser, "#tree table"))


@pytest.mark.usefixtures("quiet")
def test_theme_follows_system_until_chosen(browser, hundred):
    """The theme follows the system until a person chooses."""
    back = "return getComputedStyle(document.body).backgroundColor"
    look(browser, width=1600, dark=True)
    browser.get(hundred.url)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    dark = browser.execute_script(back)
    assert text_of(browser, "#theme") == "Theme: auto"
    browser.find_element("id", "theme").click()
    assert text_of(browser, "#theme") == "Theme: light"
    light = browser.execute_script(back)
    assert light != dark
    browser.refresh()
    assert browser.execute_script(back) == light
    browser.find_element("id", "theme").click()
    assert browser.execute_script(back) == dark
    browser.execute_script("localStorage.clear()")


# ------------------------------------------------------------------------------------------------ time, life


@pytest.mark.usefixtures("quiet")
def test_page_of_100_devices_is_timed(browser, hundred, record_property):
    """A page of 100 devices paints and updates, and how long that takes is recorded."""
    look(browser, width=1600)
    browser.get(hundred.url)
    until(lambda: "Live" in text_of(browser, "#feed"))
    paint = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    paint_s = until(lambda: browser.execute_script(paint)) / 1e3
    count = "return performance.getEntriesByName('shoal-update').length"
    before = browser.execute_script(count)
    hundred.close_rounds(1)
    impaired(hundred)
    until(lambda: "31 of 60" in text_of(browser, "#tiles"))
    assert browser.execute_script(count) > before
    took = browser.execute_script("return performance.getEntriesByName('shoal-update').map((e) => e.duration)")
    update_s = max(took) / 1e3
    record_property("first_paint_s", paint_s)
    record_property("update_s", update_s)
    print(f"100 devices: first paint {paint_s:.3f} s, update {update_s:.3f} s")  # noqa: T201 - the figures of the documents


def test_lost_aggregator_is_said(browser, tmp_path):
    """A lost aggregator is said and figures stay."""
    look(browser, width=360)
    with PagePlace(tmp_path, names(3)) as place:
        place.close_rounds(2)
        place.publish()
        browser.get(place.url)
        until(lambda: "Live" in text_of(browser, "#feed"))
        assert text_of(browser, "#verdict h3") == "All is well"
        place.publish(received=3, computing=True)
        until(lambda: "3 uploads are in, and the new models are being computed" in text_of(browser, "#verdict"))
        place.publish(connected=False)
        until(lambda: text_of(browser, "#verdict h3") == "No connection to the broker")
        assert "To do" not in text_of(browser, "#verdict h3")
        assert "start the broker" in text_of(browser, "#verdict")
        assert "No connection to the broker" in text_of(browser, "#spoken")
    until(lambda: "No connection to the aggregator: figures of" in text_of(browser, "#feed"))
    assert "2 of 60" in text_of(browser, "#tiles")
    assert browser.execute_script(AUDIT) == []
    complaints(browser)


@pytest.mark.usefixtures("quiet")
def test_fleets_without_figures_have_a_page(browser, tmp_path):
    """A fleet without a run and one before its first round have a page."""
    look(browser, width=360)
    with PagePlace(tmp_path, names(3)) as place:
        place.publish(plan=None)
        browser.get(place.url)
        assert text_of(browser, "#verdict h3") == "Ready, and no run yet"
        assert browser.execute_script(AUDIT) == []
        place.publish()
        until(lambda: text_of(browser, "#verdict h3") == "All is well")
        assert "begins with the first closed round" in text_of(browser, "#tree")
        assert browser.execute_script(AUDIT) == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("width", WIDTHS)
def test_reported_condition_is_in_the_table(browser, tmp_path, width):
    """Devices that report their condition have it in the table."""
    look(browser, width=width)
    vitals = Vitals(
        disk_free_bytes=12_300_000_000,
        memory_bytes=1_000_000_000,
        memory_free_bytes=412_000_000,
        load=0.52,
        cores=4,
        temperature_c=51.4,
        battery_percent=80,
        charging=True,
    )
    with PagePlace(tmp_path, names(3)) as place:
        place.publish()
        browser.get(place.url)
        until(lambda: "dev-001" in text_of(browser, "#device-table"))
        assert "Condition" not in text_of(browser, "#device-table")
        place.publish(changes={"dev-001": {"vitals": vitals, "vitals_at_s": NOW_S}})
        until(lambda: "disk 12.3 GB" in text_of(browser, "#device-table"))
        words = text_of(browser, "#device-table")
        assert "disk 12.3 GB free, memory 412 MB of 1 GB free, load 0.52 on 4 cores, 51.4 °C" in words
        assert "battery 80 %, charging" in words
        assert browser.execute_script(AUDIT) == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("width", WIDTHS)
def test_other_version_is_marked(browser, tmp_path, width):
    """A device of another version is marked with what to do."""
    look(browser, width=width)
    with PagePlace(tmp_path, names(3)) as place:
        place.publish(changes={"dev-001": {"version": "0.0.9"}, "dev-002": {"version": "0.2.0"}})
        browser.get(place.url)
        until(lambda: "dev-001" in text_of(browser, "#device-table"))
        words = text_of(browser, "#device-table")
        assert "upgrade Shoal on it to 0.1.0, one device after the other; it takes part meanwhile" in words
        assert "upgrade the aggregator, which has 0.1.0" in words
        assert (words.count("0.0.9 older"), words.count("0.2.0 newer")) == (1, 1)
        assert text_of(browser, "#verdict h3") == "All is well"
        assert "Aggregator: Shoal 0.1.0." in text_of(browser, "#made")
        assert browser.execute_script(AUDIT) == []


@pytest.mark.usefixtures("quiet")
def test_earlier_runs_are_in_a_menu(browser, tmp_path):
    """An earlier run stays on the page while the served one goes on; no row of a device is wider than a phone."""
    look(browser, width=390, dark=True)
    with PagePlace(tmp_path, names(3)) as place:
        place.close_rounds(2)
        second = dataclasses.replace(place.plan, run=2, run_id=b"2" * 16)
        with contextlib.closing(Store(tmp_path / "run-000002", second)) as store:
            store.record(1, record(1, place.devices))
            told = {"labels": {"dev-001": "name=Gate 7,site=berlin"}, "changes": {"dev-001": {"online": False}}}
            place.publish(plan=second, **told)
            browser.get(place.url)
            menu = "return [...document.querySelectorAll('#run option')].map((o) => o.textContent)"
            assert browser.execute_script(menu) == ["run 2: cfl", "run 1: cfl"]
            tiles = text_of(browser, "#tiles")
            browser.execute_script(
                "const c = document.getElementById('run'); c.value = 'run 1'; c.dispatchEvent(new Event('change'))"
            )
            assert "2 of 60" in text_of(browser, "#tiles") != tiles
            store.record(2, record(2, place.devices))
            store.record(3, record(3, place.devices))
            updates = "return performance.getEntriesByName('shoal-update').length"
            before = browser.execute_script(updates)
            place.publish(plan=second, **told)
            until(lambda: browser.execute_script(updates) > before)
            assert "2 of 60" in text_of(browser, "#tiles")
            browser.execute_script(
                "const c = document.getElementById('run'); c.value = ''; c.dispatchEvent(new Event('change'))"
            )
            assert "3 of 60" in text_of(browser, "#tiles")
        row = text_of(browser, "#device-table tbody tr")
        assert row.startswith("Gate 7 (dev-001)")
        assert "site=berlin" in row
        assert "75.0 %" in row
        fits = "const s = document.querySelector('#device-rows .scroll'); return s.scrollWidth <= s.clientWidth"
        assert browser.execute_script(fits)
        assert browser.execute_script(AUDIT) == []


@pytest.mark.usefixtures("quiet")
def test_text_of_devices_is_never_markup(browser, tmp_path):
    """Text of devices never becomes markup."""
    look(browser, width=360)
    devices = ("dev-000", "dev-001")
    with PagePlace(tmp_path, devices, fleet="reef") as place:
        place.close_rounds(2, events=[{"round": 1, "kind": HOSTILE, "reason": HOSTILE}])
        place.publish(changes={"dev-000": {"version": HOSTILE}})
        browser.get(place.url)
        until(lambda: "Live" in text_of(browser, "#feed"))
        assert HOSTILE in text_of(browser, "#events")
        assert HOSTILE in text_of(browser, "#device-table")
        assert browser.execute_script("return document.querySelectorAll('img').length") == 0
        assert browser.title == "reef – Shoal"


def test_token_is_asked_for_and_serves_all(browser, tmp_path):
    """A token is asked for and carries the events too."""
    token = "a-secret-of-this-test"
    look(browser, width=1600)
    with PagePlace(tmp_path, names(2), token=token.encode()) as place:
        place.publish()
        browser.get(place.url)
        assert "reef" not in browser.page_source
        browser.get(place.url.replace("http://", f"http://owner:{token}@"))
        until(lambda: "Live" in text_of(browser, "#feed"))
        place.close_rounds(1)
        place.publish()
        until(lambda: "1 of 60" in text_of(browser, "#tiles"))
    complaints(browser)


# ------------------------------------------------------------------------------------------------ stills


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_still_of_two_runs_needs_no_server(browser, tmp_path, width):
    look(browser, width=width, dark=width == WIDTHS[0])
    runs = [
        history_of(
            RunHistory(name=name, algorithm=name, rounds=20, results=[("Groups found", "all")]),
            [record(r, names(8)) for r in range(1, 21)],
        ).document()
        for name in ("fedavg", "cfl")
    ]
    path = tmp_path / "report.html"
    write_still(path, "digits", runs, note="A simulation of eight devices.")
    browser.get(path.as_uri())
    assert text_of(browser, "#verdict").startswith("fedavg")
    assert "A simulation of eight devices." in text_of(browser, "#verdict")
    assert browser.execute_script("return document.getElementById('devices').checkVisibility()") is False
    browser.execute_script(
        "const c = document.getElementById('run'); c.value = 'cfl'; c.dispatchEvent(new Event('change'))"
    )
    assert text_of(browser, "#verdict").startswith("cfl")
    assert browser.execute_script(AUDIT) == []
    assert [u for u in requested(browser) if u.startswith("http")] == []


# ------------------------------------------------------------------------------------------------ a real fleet


@pytest.mark.long
@pytest.mark.broker
def test_page_follows_a_real_fleet(browser, tmp_path):
    """The page follows a real fleet while it trains."""
    from shoal.protocol.recipe import LocalTraining, Recipe
    from shoal.transport.local_broker import find_mosquitto, free_port, start_broker
    from tests.helpers.forked_stages import ForkedStage
    from tests.helpers.tasks import logistic_bundle, samples

    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    devices = ("dev-0", "dev-1", "dev-2")
    port = free_port()
    local = LocalTraining(epochs=1, batch_size=16, lr=0.2)
    options = Recipe("fedavg", rounds=100_000, local=local, min_contributors=3, quorum=1.0, deadline_s=1.5, seed=1)
    look(browser, width=1600)
    with start_broker("mosquitto", tmp_path / "b") as broker, ForkedStage(tmp_path / "s", broker.url, devices) as stage:
        bundle = logistic_bundle()
        stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), options)
        stage.start_aggregator("--http", f"127.0.0.1:{port}")
        for seed, name in enumerate(devices):
            x, y = samples(60, seed=seed)
            np.savez(tmp_path / f"{name}.npz", x=x, y=y)
            stage.start_device(name, tmp_path / f"{name}.npz")
        until(lambda: "fleet page" in stage.programs["aggregator"].log.read_text())
        browser.get(f"http://127.0.0.1:{port}/")
        until(lambda: text_of(browser, "#verdict h3") == "All is well")
        closed = lambda: int(text_of(browser, "#tiles dd.big").split()[0])  # noqa: E731
        first = until(closed)
        until(lambda: closed() > first)
        assert "3 of 3" in text_of(browser, "#tiles")
        stage.stop("dev-2", 9)
        until(lambda: "can't go on" in text_of(browser, "#verdict") and "dev-2" in text_of(browser, "#verdict"))
        assert "start dev-2 again" in text_of(browser, "#verdict")
        assert stage.stop("aggregator") == 0
        until(lambda: "No connection to the aggregator" in text_of(browser, "#feed"))
    complaints(browser)
