"""A real Chromium for the tests of pages: one for a test process, without a network other than this machine."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--no-first-run",
    "--disable-background-networking",
    "--lang=en-GB",
)


@contextmanager
def chromium():
    """Yield a driver that logs the console and every request."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def look(driver, *, width, height=900, dark=False):
    """Give the page a width in CSS pixels, and a colour scheme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})  # as on a phone
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}  # without frames to draw, scrolling would not end
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})


def requested(driver):
    """Return the addresses that the browser has asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def complaints(driver):
    """Return the errors and warnings on the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
