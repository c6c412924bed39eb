"""The page as a document: escaping, policy, and files."""

import base64
import hashlib
import re

import pytest

from shoal.errors import ConfigError
from shoal.page.page import MOST_RUNS, asset, content_security_policy, json_text, live, still, write_still
from tests.helpers.pages import embedded, names, record
from tests.unit.shoal.page.test_history import history

HOSTILE = "</script><script>alert(1)</script><!-- & {{data}} {{script}}"


def test_still_holds_data_and_no_address():
    """A still holds its data its policy and no address."""
    page = still("reef", [history(record(1, names(3))).document()], note="by hand", now_s=1_800_000_000)
    text = page.decode()
    assert embedded(page)["made_at"] == "2027-01-15T08:00:00Z"
    assert "connect-src &#x27;none&#x27;" in text
    assert "frame-ancestors" not in text
    assert re.findall(r"https?://[^\"'\s<]+", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("name", ["page.js", "page.css"])
def test_policy_has_hash_of_bytes_in_page(name):
    tag = {"page.js": "<script>", "page.css": "<style>"}[name]
    text = live("reef", {}).decode()
    inside = text.partition(tag)[2].partition(tag.replace("<", "</"))[0]
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in content_security_policy(connect=True)


def test_script_makes_no_code_of_text():
    """The script uses no way to turn text into code or markup."""
    script = asset("page.js")
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        ".on",
        "srcdoc",
    ):
        assert way not in script.replace(".online", ""), way


def test_markup_has_no_handlers():
    """The markup has no handlers and no styles of its own."""
    assert re.findall(r"\son\w+=|\sstyle=", asset("page.html")) == []


def test_hostile_text_stays_text():
    run = history(record(1, names(2), events=[{"round": 1, "kind": HOSTILE, "reason": HOSTILE}])).document()
    page = still(HOSTILE, [run], note=HOSTILE)
    assert page.count(b"<script>") == page.count(b"</script>") - 1 == 1
    assert b"alert(1)</script>" not in page
    assert embedded(page)["note"] == HOSTILE
    assert embedded(page)["runs"][0]["events"][0]["kind"] == HOSTILE


def test_json_has_no_markup():
    """Json in the page has no markup and no infinite numbers."""
    assert json_text({"a": "<&>"}) == '{"a":"\\u003c\\u0026\\u003e"}'
    with pytest.raises(ValueError, match="JSON"):
        json_text(float("nan"))


def test_a_page_has_a_bounded_number_of_runs():
    assert len(embedded(still("x", [history().document()] * (MOST_RUNS + 3)))["runs"]) == MOST_RUNS


def test_still_replaces_a_file(tmp_path):
    """A still replaces a file and people may pass it on."""
    path = tmp_path / "report.html"
    path.write_text("old")
    write_still(path, "reef", [])
    assert path.read_bytes().startswith(b"<!doctype html>")
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(ConfigError):
        write_still(tmp_path / "missing" / "report.html", "reef", [])
