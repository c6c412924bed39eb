"""Commands to the dynamic security plugin: answered ones return, refused ones are errors, and no password is shown."""

import base64
import hashlib
import json
import types

import pytest

from shoal.errors import BrokerUnreachableError, UntrustedError
from shoal.owner.broker import address, dynamic
from shoal.owner.broker.config import pattern_acl, write_broker_config
from shoal.owner.broker.dynamic import CONTROL, RESPONSE, BrokerAdmin, admit, document, shut_out
from shoal.owner.keys.directory import FleetDirectory
from shoal.transport.base import Message
from tests.helpers.receiving import founded
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    made = founded(tmp_path / "owner", "mqtt://127.0.0.1:1")
    made.users.make()
    return made


class Plugin:
    """Stands for transport and broker: answers each command with an error by its user, if there is one."""

    def __init__(self, _address, _client, sink, **_options):
        self.sink, self.sent = sink, []
        Plugin.last = self

    errors = types.MappingProxyType({})
    silent = False

    def subscribe(self, topic):
        assert topic == RESPONSE

    def start(self, *, require):
        assert require

    def publish(self, topic, payload):
        assert topic == CONTROL
        commands = json.loads(payload)["commands"]
        self.sent.append(commands)
        if self.silent:
            return
        found = []
        for command in commands:
            error = self.errors.get(command["username"])
            answer = {"command": command["command"], "correlationData": command["correlationData"]}
            found.append(answer | ({"error": error} if error else {}))
        other = [{"command": "createClient", "correlationData": "another administrator's", "error": "no"}]
        for part in (b"not json", b"{}", b"[" * 100_000, json.dumps({"responses": other}).encode(), *_halves(found)):
            self.sink(Message(RESPONSE, part, retained=False))
        self.sink(Message("shoal/v1/reef/round", b"x", retained=False))

    def close(self):
        pass


def _halves(found):
    cut = len(found) // 2
    return [json.dumps({"responses": part}).encode() for part in (found[:cut], found[cut:])]


@pytest.fixture
def plugin(monkeypatch):
    made = type("Plugin", (Plugin,), {})
    monkeypatch.setattr(address, "MqttTransport", made)
    return made


def test_first_file_has_hashes_only(fleet):
    """The first file has hashes only that match the passwords."""
    made = document(fleet.users, ["owner", "dev-1"])
    assert [c["username"] for c in made["clients"]] == ["owner", "dev-1"]
    for client in made["clients"]:
        password = fleet.users.password(client["username"])
        salt = base64.b64decode(client["salt"])
        digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, client["iterations"])
        assert base64.b64decode(client["password"]) == digest
        assert password not in json.dumps(made)


def test_commands_are_sent_in_batches(fleet, plugin, monkeypatch):
    """Other answers are passed over, and nothing is sent without a command. A device gets a user with its own password."""
    monkeypatch.setattr(dynamic, "BATCH", 2)
    plugin.errors = {"dev-1": "Client already exists", "dev-9": "Client not found"}
    with BrokerAdmin(fleet) as admin:
        admin.send([])
        admin.send([*admit(fleet, ["dev-1", "dev-2"]), *shut_out(["dev-9"])])
    assert [[c["username"] for c in batch] for batch in plugin.last.sent] == [["dev-1", "dev-2"], ["dev-9"]]
    (command,) = admit(fleet, ["dev-4"])
    assert command == {"command": "createClient", "username": "dev-4", "password": fleet.users.password("dev-4")}


def test_refused_command_shows_no_password(fleet, plugin):
    """A refused command is an error without the password."""
    plugin.errors = {"dev-2": "Invalid/missing username"}
    with BrokerAdmin(fleet) as admin, pytest.raises(UntrustedError) as caught:
        admin.send(admit(fleet, ["dev-2"]))
    assert str(caught.value) == "the broker refuses createClient: Invalid/missing username"
    assert fleet.users.password("dev-2") not in repr(caught.value) + caught.value.hint


def test_broker_without_plugin_is_reported(fleet, plugin, monkeypatch):
    plugin.silent = True
    monkeypatch.setattr(dynamic, "ANSWER_S", 0.01)
    with (
        BrokerAdmin(fleet) as admin,
        refused(BrokerUnreachableError, "did not answer", hint="broker-config --dynamic"),
    ):
        admin.send(admit(fleet, ["dev-2"]))


def test_access_list_has_no_line_a_device():
    """The access list needs no line for a device."""
    text = pattern_acl("reef", "aggregator")
    assert "\npattern write shoal/v1/reef/d/%u/up\n" in text
    assert text.count("$CONTROL") == 1
    assert (
        "user enrol\ntopic deny shoal/v1/reef/d/#\ntopic deny shoal/v1/reef/s/#\ntopic deny shoal/v1/reef/w/#\n" in text
    )
    assert "\npattern read shoal/v1/reef/w/%u/job\n" in text
    assert "user owner\ntopic readwrite $CONTROL/dynamic-security/v1/#\n" in text


def test_kind_of_broker_is_stored(fleet, tmp_path):
    """The kind of broker is stored until it is changed."""
    out = tmp_path / "broker"
    for wanted, names in ((True, "dynamic-security.json"), (None, "dynamic-security.json"), (False, "passwords")):
        write_broker_config(fleet, out, dynamic=wanted)
        there = {"passwords", "dynamic-security.json"} & {p.name for p in out.iterdir()}
        assert there == {names}
        assert ("plugin_opt_config_file" in (out / "shoal.conf").read_text()) is (names != "passwords")
    assert FleetDirectory(fleet.path).users.dynamic is False
