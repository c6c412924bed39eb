"""The HTTP server of the fleet page: its answers, its headers, its limits, and clients that mean harm."""

import base64
import http.client
import json
import socket
import time
from contextlib import closing

import pytest

from aggregator.page import server as server_module
from aggregator.page.access import Access, Listen
from aggregator.page.server import HEAD_BYTES, MOST_STREAMS, PageServer
from aggregator.status.record import SILENT_S
from shoal.errors import ConfigError
from tests.helpers.pages import PagePlace, embedded, names

TOKEN = b"a-secret-of-this-test"
HOSTILE = '</script><script>alert("x")</script>'


@pytest.fixture
def place(tmp_path):
    with PagePlace(tmp_path, names(3)) as made:
        yield made


def ask(place, path="/", method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port, timeout=5)
    with closing(connection):
        connection.request(method, path, body=body, headers={name.replace("_", "-"): v for name, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def raw(place, data, wait_s=5.0):
    """Return all that the server answers to these bytes before it closes."""
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=wait_s) as connection:
        connection.sendall(data)
        found = b""
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            pass
        return found


def test_the_page_has_the_state_and_the_run(place):
    place.publish(closed=3, received=2)
    status, headers, page = ask(place)
    data = embedded(page)
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert data["status"]["run"]["received"] == 2
    assert [d["name"] for d in data["status"]["devices"]] == list(place.devices)
    assert (data["runs"][0]["points"]["round"], data["kind"]) == ([1, 2, 3], "live")
    policy = headers["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert all("unsafe" not in rule and "http" not in rule for rule in rules.values())
    assert rules["script-src"].startswith("'sha256-")
    status, headers, content = ask(place, method="HEAD")
    assert (status, content) == (200, b"")
    assert int(headers["Content-Length"]) > 10_000


def test_no_page_before_the_first(place):
    """Before the loop has published anything there is no page."""
    assert ask(place)[0] == 503
    assert ask(place, "/readyz")[::2] == (503, b"the aggregator has just started\n")
    assert ask(place, "/healthz")[::2] == (200, b"ok\n")
    assert b"shoal_aggregator_info" in ask(place, "/metrics")[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, b"ready\n"),
        ({"connected": False}, b"not connected to the broker\n"),
        ({"at_s": int(time.time()) - SILENT_S - 9}, b"no sign of life from the aggregator's loop\n"),
    ],
)
def test_ready_means_connected_and_alive(place, options, reason):
    place.publish(**options)
    assert ask(place, "/readyz")[::2] == (200 if reason == b"ready\n" else 503, reason)


def test_the_report_is_a_still_to_save(place):
    place.publish(closed=1)
    status, headers, page = ask(place, "/report.html")
    assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="reef.html"')
    assert embedded(page)["kind"] == "still"


def test_other_paths_and_methods_are_refused(place):
    assert ask(place, "/etc/passwd")[0] == 404
    assert ask(place, "/../" + "a" * 200)[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert ask(place, method=method, body=b"x")[::2] == (501, b"Not Implemented\n")


def test_text_of_devices_can_not_leave_data(tmp_path):
    with PagePlace(tmp_path, ("dev-1",)) as place:
        place.publish(changes={"dev-1": {"version": HOSTILE}})
        page = ask(place)[2]
    assert embedded(page)["status"]["devices"][0]["version"] == HOSTILE
    assert HOSTILE.encode() not in page


# ------------------------------------------------------------------------------------------------ who may ask


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:9464", "127.0.0.1.attacker.example", "10.0.0.1", ""]
)
def test_foreign_host_name_is_refused(place, host):
    """A web page elsewhere can let its own name resolve to 127.0.0.1."""
    place.publish()
    status, _, content = ask(place, Host=host)
    assert status == 421
    assert b"reef" not in content


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9464", "[::1]:9464", "127.1.2.3"])
def test_loopback_names_are_answered(place, host):
    """``ssh -L`` may use another port."""
    place.publish()
    assert ask(place, Host=host)[0] == 200


def test_token_guards_all_but_health(tmp_path):
    """With a token each answer but health needs it."""
    with PagePlace(tmp_path, names(2), token=TOKEN) as place:
        place.publish()
        for path in ("/", "/events", "/report.html", "/metrics", "/nothing"):
            status, headers, content = ask(place, path)
            assert (status, content) == (401, b"The token is missing or wrong.\n")
            assert headers["WWW-Authenticate"].startswith("Basic realm=")
        assert ask(place, "/healthz")[0] == ask(place, "/readyz")[0] == 200
        basic = base64.b64encode(b"anybody:" + TOKEN).decode()
        for shown in (f"Bearer {TOKEN.decode()}", f"bearer {TOKEN.decode()}", f"Basic {basic}"):
            assert ask(place, "/metrics", Authorization=shown)[0] == 200
        for shown in (
            "Bearer",
            "Bearer wrong",
            f"Digest {TOKEN.decode()}",
            "Basic ???",
            f"Bearer {TOKEN.decode()[:-1]}",
        ):
            assert ask(place, "/metrics", Authorization=shown)[0] == 401


# ------------------------------------------------------------------------------------------------ limits


def test_a_head_above_the_limit_is_not_read(place):
    assert raw(place, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (2 * HEAD_BYTES)) == b""
    assert ask(place, "/healthz")[0] == 200


def test_a_slow_head_ends_at_its_deadline(place, monkeypatch):
    monkeypatch.setattr(server_module, "HEAD_S", 0.2)
    assert raw(place, b"GET /healthz HTTP/1.1\r\n") == b""


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"\xff" * 99 + b"\r\n"],
)
def test_nonsense_is_refused_and_survived(place, data):
    """Nonsense is refused and the next request is answered."""
    assert not raw(place, data + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert ask(place, "/healthz")[0] == 200


def test_too_many_connections_are_closed(place, monkeypatch):
    """Connections above the limit are closed at once."""
    monkeypatch.setattr(server_module, "HEAD_S", 30.0)
    held = [socket.create_connection(("127.0.0.1", place.server.port)) for _ in range(server_module.MOST_CONNECTIONS)]
    try:
        end_s = time.monotonic() + 10
        while raw(place, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") != b"":
            assert time.monotonic() < end_s, "the connections above were not all accepted"
    finally:
        for connection in held:
            connection.close()
    end_s = time.monotonic() + 10
    while not raw(place, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < end_s, "closed connections do not count any more"


# ------------------------------------------------------------------------------------------------ events


def events_of(place):
    """Return an open stream of events, and a function that returns the next one's data."""
    connection = http.client.HTTPConnection("127.0.0.1", place.server.port, timeout=10)
    connection.request("GET", "/events")
    answer = connection.getresponse()

    def following():
        while True:
            line = answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    return connection, answer, following


def test_events_repeat_only_changes(place, monkeypatch):
    """Events follow the fleet and repeat only changes."""
    monkeypatch.setattr("aggregator.page.feed.UPDATE_S", 0.01)
    monkeypatch.setattr(server_module, "UPDATE_S", 0.02)
    place.publish(received=0)
    connection, answer, following = events_of(place)
    with closing(connection):
        assert answer.getheader("Content-Type") == "text/event-stream"
        first = following()
        assert (first["status"]["run"]["received"], first["runs"][0]["closed"]) == (0, 0)
        place.publish(received=1)
        second = following()
        assert second["status"]["run"]["received"] == 1
        assert "runs" not in second
        place.publish(closed=1)
        while "runs" not in (third := following()):
            assert third["status"]["run"]["round"] == 2  # the facts may come before the store's round
        assert third["runs"][0]["closed"] == 1


def test_silent_stream_sends_a_sign_of_life(place, monkeypatch):
    monkeypatch.setattr(server_module, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(server_module, "UPDATE_S", 0.02)
    place.publish()
    connection, answer, following = events_of(place)
    with closing(connection):
        following()
        answer.readline()
        assert answer.readline() == b": alive\n"


def test_too_many_streams_come_back_later(place):
    """Streams above the limit are told to come back."""
    place.publish()
    held = [events_of(place) for _ in range(MOST_STREAMS)]
    for _, _, following in held:
        following()
    status, headers, _ = ask(place, "/events")
    assert (status, headers["Retry-After"]) == (503, "5")
    assert ask(place, "/healthz")[0] == 200
    for connection, answer, _ in held:
        answer.close()
        connection.close()


def test_failed_answer_is_logged(place, caplog):
    """A failed answer is logged and a client that went away is not."""
    place.publish()
    place.feed.current = None
    assert raw(place, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    assert [r.message for r in caplog.records] == ["the fleet page failed to answer"]
    caplog.clear()
    assert raw(place, b"GET / HTTP/1.1\r\nX: " + b"a" * HEAD_BYTES) == b""
    assert caplog.records == []


def test_leaving_client_frees_its_stream(place, monkeypatch):
    """A person reloads the page more often than there are streams."""
    monkeypatch.setattr(server_module, "UPDATE_S", 30.0)
    place.publish()
    for _ in range(3 * MOST_STREAMS):
        connection, answer, following = events_of(place)
        following()
        answer.close()
        connection.close()
        end_s = time.monotonic() + 10
        while not place.server.streams.acquire(blocking=False):
            assert time.monotonic() < end_s
        place.server.streams.release()


def test_end_of_the_server_ends_its_streams(tmp_path):
    place = PagePlace(tmp_path, names(2))
    with place:
        place.publish()
        connection, answer, following = events_of(place)
        following()
    assert answer.read() is not None
    connection.close()


def test_address_that_is_taken_is_an_error(place):
    access = Access(Listen("127.0.0.1", place.server.port))
    with pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1:"):
        PageServer(access, place.feed, place.metrics)
