"""A loopback fleet in which one rostered device signs false messages with its real key, one false field in each round.

`Liar` replaces the functions that sign and seal for one device: it changes one field of the next message that has it, and the
device's own program goes on with the false message. `Scene` plays a list of lies, each in a round of its own with an honest round
after it, and notes whom the fleet names.
"""

import dataclasses
import logging
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
from shoal_lab.loopback.transport import LoopbackTransport

from aggregator.status.facts import ConnectionFacts, LiveFacts
from aggregator.status.record import Facts, build
from aggregator.sums import FALSE_SHARE
from crypto.seal.identity import _purpose
from edge_client import uplink
from edge_client.learning import update
from edge_client.membership import DeviceMembership
from edge_client.models import checkpoints
from edge_client.protocol import presence
from edge_client.uplink import ControlMessages
from shoal.errors import ShoalError
from shoal.hints import field_hints
from shoal.limits import MAX_NOTE_BYTES
from shoal.membership import statements
from shoal.owner.enrolment.admission import Registrar
from shoal.protocol import codec
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.documents import ReceivingNotice
from shoal.protocol.messages import Decline, DeclineReason, Presence, Reminder, Sealed, Upload, Vitals
from shoal.protocol.shards import UploadPart
from shoal.protocol.states import SealedCheckpoints, SealedState, Statement
from shoal.protocol.sums import KeeperShare
from shoal.protocol.topics import Topics
from tests.helpers.fleets import (
    Wiretap,
    make_fleet,
    names,
    restart_device,
)
from tests.scenarios.hostile.falsehoods import falsehoods, kind_of, nested, value_at, with_false

SIGNED = (
    Upload,
    Statement,
    SealedCheckpoints,
    SealedState,
    UploadPart,
    Decline,
    Reminder,
    Presence,
    ReceivingNotice,
    Sealed,
    KeeperShare,
)
"""Messages that a device signs, or that are in a message that it signs, apart from those that are fields of others."""
VITALS = Vitals(
    uptime_s=1000,
    disk_free_bytes=1 << 34,
    memory_bytes=1 << 30,
    memory_free_bytes=1 << 29,
    load=0.5,
    cores=4,
    temperature_c=40.0,
    battery_percent=80,
    charging=False,
)


def paths():
    """Return the row of each signed field, such as ``HeldState.digest`` -> (message that is sent, path in it)."""
    found = {}
    for message in SIGNED:
        found |= _paths(message, message, ())
    return found


def _paths(message, sent, above):
    found = {}
    for name, hint in field_hints(message).items():
        path = (*above, name)
        found[f"{message.__name__}.{name}"] = (sent, path)
        if nested(hint) is not None:
            found |= _paths(nested(hint), sent, path)
    return found


def hint_of(row):
    """Return the type of a row's field."""
    path = paths()[row][1]
    owner = row.split(".")[0]
    kind = next(k for k in codec._BY_KIND.values() if k.__name__ == owner)
    return field_hints(kind)[path[-1]]


ENVELOPE_BYTES = 400
"""More than head, seal and signature of a short message take."""
MAX_HEAD_TEXT = 900
"""A longer text does not fit an envelope's head."""
VECTORS = {
    "zeros": lambda t, *_: np.zeros_like(t),
    "NaN": lambda t, *_: np.full_like(t, np.nan),
    "infinite": lambda t, *_: np.full_like(t, np.inf),
    "huge": lambda t, *_: np.full_like(t, 3e38),
    "a hundred times": np.errstate(over="ignore", invalid="ignore")(lambda t, *_: t * np.float32(100)),
    "reversed": lambda t, *_: -t,
    "repeated from before": lambda _t, last, _o: last,
    "another device's": lambda _t, _l, other: other,
}


@dataclasses.dataclass(frozen=True)
class Lie:
    """One false value: of the field ``row``, or of the vector ``row``; ``make`` as in `Falsehood`.

    ``others`` are told in its place where it is the truth.
    """

    row: str
    name: str
    make: object
    others: tuple = ()

    @property
    def vector(self):
        return self.row.endswith(" vector")

    @property
    def sent(self):
        if self.vector:
            return SealedState if self.row.startswith("checkpoint") else Upload
        return paths()[self.row][0]

    @property
    def path(self):
        return () if self.vector else paths()[self.row][1]


def lies_of(row):
    """Return all lies about a row."""
    if row.endswith(" vector"):
        return [Lie(row, name, make) for name, make in VECTORS.items()]
    return [Lie(row, f.name, f.make) for f in falsehoods(hint_of(row))]


@dataclasses.dataclass(frozen=True)
class Saying:
    """A lie that was told; whether its message is within the size of its channel, whether it can be decoded, and its round."""

    lie: Lie
    fits: bool = True
    readable: bool = True
    round: int | None = None


def _fits(data, kind):
    return kind in (Upload, Statement, SealedState, SealedCheckpoints) or len(data) < MAX_NOTE_BYTES - ENVELOPE_BYTES


def _reads(data, kind):
    try:
        decode(data, kind)
    except ShoalError:
        return False
    return True


def one_lie_of(row):
    """Return the first lie about a row that is none of the true value, of an order in which each kind of value has one."""
    lies = lies_of(row)
    first = sum(map(ord, row)) % len(lies)
    found = [*lies[first:], *lies[:first]]
    return dataclasses.replace(found[0], others=tuple(found[1:]))


class Liar:
    """Signs false messages for one device of the process.

    Attributes:
        name: the device.
        lie: the lie that it tells now; None for the truth.
        told: what it has said.
    """

    def __init__(self, patch, name):
        self.name, self.lie, self.told = name, None, []
        self._last, self._others = {}, {}
        for module, function in (
            (update, "seal_message_to_member"),
            (update, "seal_to_member"),
            (uplink, "seal_message_to_member"),
            (presence, "seal_to_group"),
            (checkpoints, "seal_message_to_group"),
            (presence, "sign_document"),
            (statements, "sign_document"),
        ):
            patch.setattr(module, function, getattr(self, f"_{function}")(getattr(module, function)))

    def _false(self, identity, message):
        """Return the bytes to sign in place of a message."""
        kind = type(message)
        if identity.name != self.name:
            self._others[kind] = message
            return encode(message)
        last, self._last[kind] = self._last.get(kind), message
        lie = self.lie
        if lie is None or lie.vector or lie.sent is not kind:
            return encode(message)
        true = value_at(message, lie.path)
        if len(lie.path) > 1 and value_at(message, lie.path[:-1]) in ((), None):
            return encode(message)
        before = None if last is None else value_at(last, lie.path)
        other = self._others.get(kind)
        for choice in (lie, *lie.others):
            false = choice.make(true, before, None if other is None else value_at(other, lie.path))
            if false is None and kind_of(hint_of(lie.row))[0] != "optional":
                continue
            try:
                data = with_false(message, lie.path, false)
            except (struct.error, TypeError):
                continue
            if data != encode(message):
                self.told.append(Saying(choice, _fits(data, kind), _reads(data, kind), getattr(message, "round", None)))
                return data
        return encode(message)

    def _vector(self, identity, prefix, data):
        """Return a vector's bytes, false if the lie is about it."""
        vector = np.frombuffer(data, "<f4")
        if identity.name != self.name:
            self._others[prefix] = vector
            return data
        last, self._last[prefix] = self._last.get(prefix), vector
        if self.lie is None or self.lie.row != f"{prefix} vector" or not len(vector):
            return data
        false = self.lie.make(vector, last, self._others.get(prefix))
        if false is None or len(false) != len(vector) or false.tobytes() == vector.tobytes():
            return data
        self.told.append(Saying(self.lie))
        return false.astype("<f4").tobytes()

    def _head(self, identity, head):
        """Return the envelope's head; a false one must be encodable, since it is what opens the envelope."""
        if identity.name != self.name or self.lie is None or self.lie.sent is not Sealed:
            self._others[Sealed] = head if identity.name != self.name else self._others.get(Sealed)
            return head
        (field,) = self.lie.path
        other = self._others.get(Sealed)
        for choice in (self.lie, *self.lie.others):
            false = choice.make(getattr(head, field), None, None if other is None else getattr(other, field))
            if isinstance(false, str) and len(false) < MAX_HEAD_TEXT and false != getattr(head, field):
                self.told.append(Saying(choice))
                return dataclasses.replace(head, **{field: false})
        return head

    def _seal_message_to_member(self, seal):
        def false(identity, key, head, data, body=b""):
            message = _decoded(data)
            if isinstance(message, Upload):
                body = self._body(identity, message, b"".join(body) if isinstance(body, list) else bytes(body))
                message = dataclasses.replace(message, attached=message.attached + body[1])
                body = body[0]
                head = self._head(identity, head)
            return seal(identity, key, head, self._false(identity, message), body)

        return false

    def _seal_to_member(self, seal):
        def false(identity, key, head, plain):
            return seal(identity, key, head, self._false(identity, decode(plain, KeeperShare)))

        return false

    def _body(self, identity, upload, body):
        """Return an upload's body with its lies, and by how many bytes it has grown."""
        cut = len(body) - upload.attached
        kind = "statistics" if upload.phase == 10 else "update"
        vector = self._vector(identity, kind, body[:cut]) if upload.precision == "float32" else body[:cut]
        if not upload.attached:
            return vector, 0
        head, rest = decode_prefix(body[cut:], SealedCheckpoints)
        attached = self._false(identity, head) + bytes(rest)
        return vector + attached, len(attached) - upload.attached

    def _seal_message_to_group(self, seal):
        def false(identity, key, head, *plain):
            message, rest = decode_prefix(b"".join(plain), SealedState)
            task, vector = rest[: message.task], rest[message.task :]
            vector = self._vector(identity, "checkpoint", bytes(vector))
            return seal(identity, key, head, self._false(identity, message) + bytes(task) + vector)

        return false

    def _seal_to_group(self, seal):
        def false(identity, key, head, plain):
            message = decode(plain, Presence)
            if identity.name == self.name and self.lie is not None and self.lie.row.startswith("Vitals."):
                message = dataclasses.replace(message, vitals=VITALS)
            return seal(identity, key, head, self._false(identity, message))

        return false

    def _sign_document(self, _sign):
        def false(identity, document):
            content = self._false(identity, document)
            return identity.sign(_purpose(type(document)), content) + content

        return false


def _decoded(data):
    return decode(data, codec._BY_KIND[data[4]])


@dataclasses.dataclass
class Told:
    """What a round showed about a lie.

    Attributes:
        saying: the lie as told.
        named: the devices that records, status or the owner's programs blame, with the reason.
        missing: devices that did not upload in that round.
    """

    saying: Saying
    named: dict
    missing: list
    meant: Lie | None = None


class Warned(logging.Handler):
    """Keeps the warnings of all programs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append((record.name, record.getMessage(), {k: str(v) for k, v in getattr(record, "kv", {}).items()}))


class Scene:
    """A fleet that plays a script.

    Args:
        root: an empty directory.
        place: of the liar in the order of names.
        count: devices.
        options: of the run.
    """

    def __init__(self, root, place, lies, *, count=3, data=None, bundle=None, shards=1, **options):
        self.tap, self.patch = Wiretap(), pytest.MonkeyPatch()
        self.all = names(count)
        self.liar = Liar(self.patch, self.all[place])
        self.lies = list(lies)
        wanted = {
            "rounds": 2 * sum(map(self.tries, self.lies)) + 2,
            "min_contributors": 2,
            "evaluate_every": 1,
            **options,
        }
        self.fleet = make_fleet(root, data, bundle=bundle, faults=self.tap, count=count, shards=shards, **wanted)
        self.found, self.complaints = [], []
        self.log = Warned()

    @staticmethod
    def tries(lie):
        """How often a lie is tried: a device may miss the round in which it would sign the statement."""
        return 3 if lie.sent is Statement else 1

    @property
    def honest(self):
        return [name for name in self.all if name != self.liar.name]

    def __enter__(self):
        logging.getLogger("shoal").addHandler(self.log)
        return self

    def __exit__(self, *_):
        logging.getLogger("shoal").removeHandler(self.log)
        self.patch.undo()
        self.fleet.__exit__(None, None, None)

    @property
    def open_round(self):
        return self.fleet.service.state.round

    def play(self, seconds=400):
        """Tell each lie in a round of its own, then let the run end; return what each of them showed."""
        fleet, liar = self.fleet, self.liar
        for lie in [each for each in self.lies for _ in range(self.tries(each))]:
            if any(told.saying.lie.row == lie.row and lie in (told.saying.lie, told.meant) for told in self.found):
                continue
            # A statement is signed as soon as a round opens, all else later.
            due = 0 if lie.sent is Statement else 1
            fleet.run_until(lambda due=due: (self.open_round and self.open_round % 2 == due) or fleet.finished, seconds)
            if fleet.finished:
                raise AssertionError("the run was too short for its lies")
            self._tell(lie, seconds)
        liar.lie = None
        fleet.run_until(lambda: fleet.finished, seconds)
        fleet.settle()
        return self.found

    def live(self, seconds=2000):
        """Tell the only lie wherever it can be told, from the first round to the end; return what that showed."""
        fleet, liar = self.fleet, self.liar
        (liar.lie,) = self.lies
        fleet.run_until(lambda: fleet.finished, seconds)
        fleet.settle()
        rounds = [r["round"] for r in fleet.records()]
        named = {device: why for at in rounds for device, why in self.accused(at).items()}
        missing = sorted({name for r in fleet.records() for name in r["missing"]})
        self.found = [Told(saying, named, missing) for saying in liar.told[:1]]
        return self.found

    def _tell(self, lie, seconds):
        fleet, liar = self.fleet, self.liar
        at, told = self.open_round, len(liar.told)
        complained = len(self.complaints)
        watch = fleet.service.watch.devices
        watch._devices = {d: dataclasses.replace(f, refused="", declined="") for d, f in watch._devices.items()}
        liar.lie = lie
        rule = self._prepare(lie)
        if lie.sent is Statement:
            fleet.run_until(lambda: self.open_round > at or fleet.finished, seconds)
            at += 1
        fleet.run_until(lambda: self.open_round > at or fleet.finished, seconds)
        liar.lie = None
        if rule is not None:
            self.tap.forgive(rule)
        if lie.sent is ReceivingNotice:
            self.owner_listens()
        # A device may sign a statement again in the round before, whose upload is there already.
        said = [s for s in liar.told[told:] if lie.sent is not Statement or s.round == at]
        if not said:
            return
        saying = said[0]
        at = at if lie.sent is Reminder else saying.round or at
        named = self.accused(at, self.complaints[complained:])
        missing = next((r["missing"] for r in fleet.records() if r["round"] == at), [])
        self.found.append(Told(saying, named, missing, lie))
        if lie.sent in (Presence, ReceivingNotice):
            restart_device(fleet, liar.name)

    def _prepare(self, lie):
        """Bring about what makes the device send the message of a lie."""
        fleet, name = self.fleet, self.liar.name
        if lie.sent in (Presence, ReceivingNotice):
            restart_device(fleet, name)
        if lie.sent is Reminder:
            return self.tap.lose(client=fleet.client_id(name), ending="/up", times=1)
        if lie.sent is Decline:
            device, round_ = fleet.devices[name], self.open_round
            topic, nonce = Topics(fleet.plan.fleet).up(name), fleet.service._engine.nonce(round_)
            note = ControlMessages(DeviceMembership(fleet.stage.device_dir(name)), device.transport, topic)
            note.decline(SimpleNamespace(run_id=fleet.plan.run_id, nonce=nonce, round=round_), DeclineReason.DATA)
            return self.tap.lose(client=fleet.client_id(name), ending="/up", header={"kind": ChunkKind.UPLOAD})
        return None

    def owner_listens(self):
        """Let the owner read what the broker retains for it, as `shoal-fleet` does."""
        fleet, owner = self.fleet, self.fleet.stage.fleet

        def on_event(event):
            try:
                registrar.on_event(event, 1)
            except ShoalError as error:
                self.complaints.append(f"ignored a message: {error}")

        transport = LoopbackTransport(fleet.broker, "owner", on_event)
        registrar = Registrar(owner, transport, self.complaints.append)
        registrar.start(1)
        transport.start()
        fleet.broker.pump()
        transport.close()
        return registrar

    def accused(self, round_, complaints=()):
        """Return device -> why, of all devices that the owner is told about after a round."""
        found = {}
        for record in self.fleet.records():
            if record["round"] != round_:
                continue
            for what in ("declined", "out_of_step", "refused_norm", "capped"):
                found |= {d: f"{what}: {why}" for d, why in record[what].items()}
            for event in record["events"]:
                if "device" in event:
                    found[event["device"]] = event["kind"]
                if event.get("reason") == FALSE_SHARE:
                    found |= dict.fromkeys(event["devices"], FALSE_SHARE)
        found |= {device.name: f"status: {device.reason}" for device in self.status().devices if self.blames(device)}
        for text in complaints:
            found |= {d: text for d in self.all if d in text}
        return found

    @staticmethod
    def blames(device):
        """Whether the status of a device says more than that it is not connected."""
        return bool(device.reason) and device.reason != "offline"

    def status(self):
        """Return the fleet's state as the aggregator answers it to the owner."""
        service, now_s = self.fleet.service, int(time.time())
        connection = ConnectionFacts(broker="", connected=True, since_s=now_s - 3600)
        known = service.watch.devices.devices
        live = LiveFacts(version="", connection=connection, devices=known, alive_at_s=now_s)
        return build(Facts(fleet="demo", running=True, live=live, broker="", active=self.all, now_s=now_s))
