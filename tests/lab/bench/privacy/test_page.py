"""The privacy benchmark as an HTML page that loads nothing."""

import html
import re
import struct
import zlib

import numpy as np
from shoal_lab.bench.attacks.registry import ATTACKS
from shoal_lab.bench.privacy.page import page, png

from tests.helpers.privacy_reports import mode_report, whole


def test_a_picture_is_a_png_of_the_right_levels():
    """Parsed by hand: signature, size, and the rows, each after a filter byte."""
    image = np.array([[0.0, 1.0, 0.5], [2.0, -1.0, 0.2]], np.float32)
    data = png(image)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3, 2)
    at = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[at - 4 : at])
    assert zlib.decompress(data[at + 4 : at + 4 + size]) == bytes([0, 0, 255, 128, 0, 255, 0, 51])


def test_the_page_is_whole_and_loads_nothing():
    text = page(whole(mode_report("none", sees_updates=True), mode_report()))
    assert text.count("src='data:image/png;base64,") == 4
    assert not re.search(r"(?:src|href)=['\"]?(?!'?data:)", text)
    assert "http" not in text
    assert "labels &lt;1&gt;" in text
    assert "labels <1>" not in text
    assert "an aggregator &amp; others" in text


def test_an_attack_is_marked_as_working_or_stopped_with_its_note():
    text = page(whole(mode_report("none"), mode_report("rotation", success=0.55)))
    assert "<td class='works' title='a &#x27;note&#x27;'>0.900</td><td class='stopped'" in text
    assert "<td class='stopped' title='a &#x27;note&#x27;'>0.550</td><td>0.500 share</td>" in text


def test_a_reconstruction_has_its_quality_in_the_caption_and_the_true_image_does_not():
    text = page(whole(mode_report()))
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions == ["labels &lt;1&gt;: true", "got: mean 0.900 share"]


def test_costs_and_computations_are_listed_mode_by_mode():
    text = page(whole(mode_report("none", sees_updates=True), mode_report()))
    assert "<td>derive_ms, d = 1e+06</td><td>10.00</td><td>10.00</td>" in text
    assert "<td>mean_error</td><td>2.0e-07</td><td>2.0e-07</td>" in text
    assert "<td>aggregator: sees_updates</td><td>yes</td><td>no</td>" in text
    assert "Sealing 1.00 ms a MB, opening 2.00 ms a MB, 162 bytes added" in text
    for attack in ATTACKS:
        assert f"<td>{html.escape(attack.name)}</td>" in text
