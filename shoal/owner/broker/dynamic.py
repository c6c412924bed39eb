"""Users of a broker with mosquitto's dynamic security plugin, which takes them while it runs.

The plugin has the users and passwords. Access stays in an access list, whose patterns hold for any user by its name, so that a
new device needs no line of its own (`shoal.owner.broker.config.pattern_acl`). `document` is the plugin's first file; afterwards
the plugin owns it, and `BrokerAdmin` sends it commands as the user ``owner``, on the topic CONTROL:

    approve, publish    create a user for each device of the roster that has none
    revoke, publish     remove the users of revoked devices; the broker disconnects them at once

Commands may be repeated: a user that exists stays, and a user that is gone is no error.

Example: ``admit(fleet, ["dev-4"])`` is the command that creates dev-4's user with its password.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import BrokerUnreachableError, UntrustedError
from shoal.owner.broker.address import OwnerLink
from shoal.owner.keys.broker_users import ITERATIONS, BrokerUsers
from shoal.transport.base import Message

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

CONTROL: Final = "$CONTROL/dynamic-security/v1"
RESPONSE: Final = f"{CONTROL}/response"
DOCUMENT_FILE: Final = "dynamic-security.json"
ANSWER_S: Final = 10.0
"""Time for the plugin's answer to one batch of commands."""
BATCH: Final = 200
"""Commands in one message; one takes about 150 bytes."""
HARMLESS: Final = frozenset({"Client already exists", "Client not found"})
PLUGIN_HINT: Final = "does mosquitto run with the files of `shoal-fleet broker-config --dynamic`?"

Command = dict[str, Any]


def document(users: BrokerUsers, names: Iterable[str]) -> dict[str, Any]:
    """Return the plugin's first file: these users, with hashed passwords."""
    return {"clients": [_client(users, name) for name in names], "groups": [], "roles": []}


def admit(fleet: FleetDirectory, names: Iterable[str]) -> list[Command]:
    """Return the commands that create the users of these devices."""
    return [{"command": "createClient", "username": n, "password": fleet.users.password(n)} for n in names]


def shut_out(names: Iterable[str]) -> list[Command]:
    """Return the commands that remove the users of these devices."""
    return [{"command": "deleteClient", "username": name} for name in names]


class BrokerAdmin(OwnerLink):
    """A connection as the user ``owner`` that sends commands to the plugin; a context manager that closes it."""

    def __init__(self, fleet: FleetDirectory) -> None:
        """Connect.

        Args:
            fleet: the owner's directory.

        Raises:
            BrokerUnreachableError: no broker answers, or it refuses the owner's user.
        """
        super().__init__(fleet)
        self.transport.subscribe(RESPONSE)
        self.transport.start(require=True)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, and return once the plugin has carried them out.

        Raises:
            UntrustedError: the plugin refuses a command.
            BrokerUnreachableError: it does not answer.
        """
        for start in range(0, len(commands), BATCH):
            self._send(commands[start : start + BATCH])

    def _send(self, commands: Sequence[Command]) -> None:
        # Answers go to every administrator of the broker; the mark tells ours.
        mark = secrets.token_hex(8)
        marked = [{**command, "correlationData": mark} for command in commands]
        self.transport.publish(CONTROL, json.dumps({"commands": marked}).encode())
        end_s, missing = time.monotonic() + ANSWER_S, len(marked)
        while missing:
            for answer in self._next_answers(end_s):
                if answer.get("correlationData") == mark:
                    missing -= 1
                    _check(answer)

    def _next_answers(self, end_s: float) -> list[dict[str, Any]]:
        """Return the answers in the next event; none if it is another one, or malformed."""
        event = self.next(max(0.0, end_s - time.monotonic()))
        if event is None:
            raise BrokerUnreachableError(
                f"the broker's dynamic security plugin did not answer in {ANSWER_S:g} s", hint=PLUGIN_HINT
            )
        if not isinstance(event, Message) or event.topic != RESPONSE:
            return []
        try:
            found = json.loads(event.payload)["responses"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []
        return [answer for answer in found if isinstance(answer, dict)] if isinstance(found, list) else []


def _check(answer: dict[str, Any]) -> None:
    error = answer.get("error")
    if error is not None and error not in HARMLESS:
        raise UntrustedError(f"the broker refuses {answer.get('command')}: {error}", hint=PLUGIN_HINT)


def _client(users: BrokerUsers, name: str) -> dict[str, Any]:
    salt, digest = users.digest(name)
    return {
        "username": name,
        "password": base64.b64encode(digest).decode(),
        "salt": base64.b64encode(salt).decode(),
        "iterations": ITERATIONS,
        "roles": [],
    }
