"""Write mosquitto's files for a fleet: passwords, access list, configuration, and certificates of its CA; and nginx's file.

A user reaches only its own topics. The CA's key stays in the owner's directory; the broker gets the server's key. Written
for mosquitto 2.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from aggregator.page.home_assistant import check_prefix, sensor_topics
from shoal import limits
from shoal.address import PORTS, BrokerAddress
from shoal.errors import ConfigError
from shoal.membership.grants import OWNER_NAME
from shoal.owner.broker.dynamic import CONTROL, DOCUMENT_FILE, document
from shoal.owner.keys.broker_users import ENROL_USER, HOME_ASSISTANT_USER
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.outputs import check_output
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.keys.settings import CA_FILE
from shoal.protocol.channels import Party, read_by, written_by
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.local_broker import (
    COPIES_QUEUED,
    HEAD_BYTES,
    MIN_QUEUED_BYTES,
    MIN_QUEUED_MESSAGES,
    NOTES_QUEUED,
    queue_limits,
)
from shoal.util.files import private_directory, read_private, write_private

CA_KEY_FILE: Final = "broker-ca.key"
CA_HINT: Final = "take both from a backup, or remove both: a new CA is then made, and every client needs its ca.crt"
CLIENTS: Final = "clients"
CONFIG_FILE: Final = "shoal.conf"
SAVED_FILES: Final = ("mosquitto.db", "mosquitto.db.new", f"{DOCUMENT_FILE}.new")
"""Files that mosquitto itself writes next to its configuration."""
PASSWORDS_FILE: Final = "passwords"
CERTIFICATES: Final = ("server.key", "server.crt", "ca.crt")
NGINX_FILE: Final = "nginx.conf"
NGINX_PORT: Final = 9001
"""Port of 127.0.0.1 at which mosquitto takes websockets from nginx."""
WRITTEN: Final = (
    PASSWORDS_FILE,
    DOCUMENT_FILE,
    "shoal.acl",
    CONFIG_FILE,
    NGINX_FILE,
    CLIENTS,
    *CERTIFICATES,
    *SAVED_FILES,
)
DEFAULT_UPLOAD_BYTES: Final = 4 << 20
"""Assumed size of an upload before any run is signed: a million coordinates."""
BYTES_PER_COORDINATE: Final = 4
CA_LIFE: Final = datetime.timedelta(days=3650)
SERVER_LIFE: Final = datetime.timedelta(days=825)
_SLACK: Final = datetime.timedelta(hours=1)
"""Certificates start this much earlier, since devices' clocks may be slow."""
TEMPLATE_WORKERS: Final = ("worker-0", "worker-1", "worker-2")
"""Workers in the access list in deploy/."""
OWN_TOPICS: Final = {
    Party.OWNER: (),
    Party.AGGREGATOR: ("party",),
    Party.WORKER: ("party", "worker"),
    Party.DEVICE: ("party", "device"),
    Party.NEWCOMER: ("token",),
}
"""Variables in topics for which each party may use no value but its own name (`TopicKind.variable`)."""


@dataclass(frozen=True, slots=True)
class Written:
    """Result of `write_broker_config`: the folder, the users, and whether the connection is encrypted."""

    folder: Path
    users: tuple[str, ...]
    tls: bool


def acl(fleet: FleetDirectory, devices: tuple[str, ...]) -> str:
    """Return mosquitto's access list for the users of a fleet; a user that is not listed may do nothing."""
    aggregator = fleet.roster.aggregator
    head = f"# Fleet {fleet.name}. Made by `shoal-fleet broker-config`: make it again after each approve and revoke."
    prefix = fleet.users.home_assistant
    lines = [head, *_common_access(fleet.name, None if aggregator is None else aggregator.name, prefix)]
    lines += _workers_access(fleet.name, (party.name for party in (*fleet.workers, *fleet.keepers)))
    for name in devices:
        lines += ["", f"user {name}", *_access("topic", fleet.name, Party.DEVICE, name)]
    return "\n".join(lines) + "\n"


def template_acl(fleet: str, aggregator: str = "aggregator") -> str:
    """Return the access list in deploy/, for client certificates: mosquitto replaces %u by the certificate's common name.

    ``python -m shoal.owner.broker.config > deploy/mosquitto/shoal.acl`` writes it.
    """
    lines = [
        f"# /etc/mosquitto/shoal.acl: replace {fleet!r} by your fleet's name.",
        "# Made by `python -m shoal.owner.broker.config` from shoal/protocol/channels.py: change it there.",
        *_common_access(fleet, aggregator),
        "",
        "# The workers of a sharded aggregator and the keepers, if there are any.",
        *_workers_access(fleet, TEMPLATE_WORKERS),
        "",
        "# A device reads the fleet's messages and its own, and writes only under its own name. Patterns hold for every user:",
        "# %u is the common name of the client's certificate.",
        *_access("pattern", fleet, Party.DEVICE, "%u"),
    ]
    return "\n".join(lines) + "\n"


def _workers_access(fleet: str, workers: Iterable[str]) -> list[str]:
    return [line for name in workers for line in (f"user {name}", *_access("topic", fleet, Party.WORKER, name))]


def pattern_acl(fleet: str, aggregator: str, prefix: str = "") -> str:
    """Return the access list for a broker with the dynamic security plugin, which creates users while it runs.

    ``prefix`` is Home Assistant's; empty without access for its sensors.
    """
    topics = Topics(fleet)
    lines = [
        f"# Fleet {fleet}. Made by `shoal-fleet broker-config --dynamic`. A new party needs no change here: %u is its user.",
        *_common_access(fleet, aggregator, prefix),
        "",
        f"user {OWNER_NAME}",
        f"topic readwrite {CONTROL}/#",
        "",
        "# The patterns below hold for every user, and these are no devices.",
        f"user {ENROL_USER}",
        *(
            f"topic deny {topics.root}/{branch}/#"
            for branch in sorted((_branches(Party.DEVICE) | _branches(Party.WORKER)) - _branches(Party.NEWCOMER))
        ),
        *(["", f"user {HOME_ASSISTANT_USER}", f"topic deny {topics.root}/#"] if prefix else []),
        "",
        *_access("pattern", fleet, Party.DEVICE, "%u"),
        *_access("pattern", fleet, Party.WORKER, "%u"),
    ]
    return "\n".join(lines) + "\n"


def _common_access(fleet: str, aggregator: str | None, prefix: str = "") -> list[str]:
    """Return the access of all users other than devices; with Home Assistant's ``prefix`` also that of its sensors."""
    lines = [
        "",
        "# Enrolment: the client id is the token's id, which only its holder and the owner know.",
        *_access("pattern", fleet, Party.NEWCOMER, "%c"),
        "",
        f"user {ENROL_USER}",
        "",
        f"user {OWNER_NAME}",
        *_access("topic", fleet, Party.OWNER, OWNER_NAME),
    ]
    if aggregator is not None:
        lines += ["", f"user {aggregator}", *_access("topic", fleet, Party.AGGREGATOR, aggregator)]
        if prefix:
            lines += [f"topic write {topic}" for topic in sensor_topics(fleet, prefix)]
            lines += ["", f"user {HOME_ASSISTANT_USER}", f"topic read {prefix}/#", f"topic write {prefix}/status"]
    return lines


def _branches(party: Party) -> set[str]:
    """Return the first levels, below the fleet's, of all topics of a party."""
    return {kind.base.partition("/")[0] for kind in (*written_by(party), *read_by(party))}


def _access(word: str, fleet: str, party: Party, name: str) -> list[str]:
    """Return the access of one party: it writes the channels that it sends or clears, and reads those that it receives.

    Args:
        word: ``topic`` for the user named above these lines, ``pattern`` for all users.
        fleet: the fleet's name.
        party: of the table of channels.
        name: the party's own level in the topics of `OWN_TOPICS`; ``%u`` or ``%c`` in patterns.
    """
    topics, written, read = Topics(fleet), written_by(party), read_by(party)
    lines = []
    for kind in TopicKind:
        may = ("read" if kind in read else "") + ("write" if kind in written else "")
        if may:
            own = name if kind.variable in OWN_TOPICS[party] else "+"
            lines.append(f"{word} {may} {topics.filter(kind).replace('+', own)}")
    return lines


def config(
    address: BrokerAddress,
    installed: Path,
    devices: int = 0,
    upload_bytes: int = DEFAULT_UPLOAD_BYTES,
    plugin: Path | None = None,
    *,
    behind_nginx: bool = False,
) -> str:
    """Return mosquitto's configuration.

    Args:
        address: the broker's address in the fleet.
        installed: folder of the other files on the broker's host; mosquitto also saves its state there.
        devices: number of devices in the fleet; sets the queue limits together with ``upload_bytes``.
        upload_bytes: size of one upload.
        plugin: the dynamic security plugin, which then has the passwords; None for a password file.
        behind_nginx: take websockets from nginx alone, which has the address's port and TLS.
    """
    passwords = [f"password_file {installed}/{PASSWORDS_FILE}"]
    if plugin is not None:
        passwords = [f"plugin {plugin}", f"plugin_opt_config_file {installed}/{DOCUMENT_FILE}"]
    lines = [
        "# Made by `shoal-fleet broker-config`.",
        "allow_anonymous false",
        *passwords,
        f"acl_file {installed}/shoal.acl",
        "",
        f"listener {NGINX_PORT} 127.0.0.1"
        if behind_nginx
        else f"listener {address.port}{f' {address.host}' if address.is_loopback else ''}",
    ]
    if address.path:
        lines.append("protocol websockets")
    if address.tls and not behind_nginx:
        lines += [f"certfile {installed}/server.crt", f"keyfile {installed}/server.key", "tls_version tlsv1.2"]
    if address.path:
        lines += ["# mosquitto 2.0.11 does not start with websockets alone.", f"listener {PORTS['mqtt']} 127.0.0.1"]
    lines += [
        "",
        "# Without this every small message waits for Nagle's algorithm.",
        "set_tcp_nodelay true",
        *queue_comment(devices, upload_bytes),
        *queue_limits(devices, upload_bytes).lines(),
        "# A chunk of a message is smaller.",
        f"max_packet_size {limits.MAX_PACKET_BYTES}",
        "# Retained messages and queues survive a restart in the file mosquitto.db of this folder, which the user that runs",
        "# mosquitto must be able to write (started as root, it becomes the user mosquitto). Mosquitto refuses a second",
        "# persistence_location: leave this one out where Debian's mosquitto.conf includes this file.",
        "persistence true",
        f"persistence_location {installed}/",
        "autosave_interval 5",
        "persistent_client_expiration 1d",
    ]
    return "\n".join(lines) + "\n"


def nginx_config(address: BrokerAddress, installed: Path) -> str:
    """Return a server of nginx that ends TLS and passes websockets on to mosquitto; arguments as in `config`.

    Who a client is, mosquitto's access list takes from user and password inside MQTT, which nginx does not touch. So nginx asks
    for no client certificate: mosquitto would not learn its name.
    """
    tls = [
        f"    ssl_certificate {installed}/server.crt;",
        f"    ssl_certificate_key {installed}/server.key;",
        "    ssl_protocols TLSv1.2 TLSv1.3;",
    ]
    return "\n".join(
        [
            "# Made by `shoal-fleet broker-config --websockets`, for the http block of nginx.conf: /etc/nginx/conf.d/shoal.conf.",
            "# Users and passwords are inside MQTT. Leave ssl_verify_client off: mosquitto sees no certificate.",
            "server {",
            f"    listen {address.port}{' ssl' if address.tls else ''};",
            f"    server_name {address.host};",
            *(tls if address.tls else []),
            f"    location = {address.path} {{",
            f"        proxy_pass http://127.0.0.1:{NGINX_PORT}/;",
            "        proxy_http_version 1.1;",
            "        proxy_set_header Upgrade $http_upgrade;",
            "        proxy_set_header Connection upgrade;",
            f"        # A client sends something every {limits.KEEPALIVE_S} s, so that only dead links end.",
            f"        proxy_read_timeout {3 * limits.KEEPALIVE_S}s;",
            f"        proxy_send_timeout {3 * limits.KEEPALIVE_S}s;",
            "        proxy_socket_keepalive on;",
            "    }",
            "}",
            "",
        ]
    )


def queue_comment(devices: int, upload_bytes: int) -> list[str]:
    """Return comment lines that explain the queue limits."""
    chunks = -(-(upload_bytes + HEAD_BYTES) // limits.CHUNK_BYTES)
    return [
        "# Above these limits mosquitto drops messages without a word. They hold for the queue of each client, and the longest",
        "# is the aggregator's while it is away. Messages, beyond those in flight: for each device",
        f"# {COPIES_QUEUED} times the {chunks} chunks of an upload, and {NOTES_QUEUED} short ones.",
        "# Bytes, those in flight included: for each device",
        f"# {COPIES_QUEUED} times an upload of {upload_bytes} bytes, and {NOTES_QUEUED} KiB.",
        f"# This is for {devices} devices, and never less than {MIN_QUEUED_MESSAGES} messages and {MIN_QUEUED_BYTES} bytes.",
        "# Mosquitto may need as much memory.",
    ]


def write_broker_config(
    fleet: FleetDirectory,
    folder: Path,
    *,
    installed: Path | None = None,
    expected: tuple[str, ...] = (),
    upload_bytes: int | None = None,
    dynamic: bool | None = None,
    plugin: Path | None = None,
    home_assistant: str | None = None,
    websockets: bool = False,
) -> Written:
    """Write password, access and certificate files for the fleet's broker, and each user's address.

    From then on the fleet's grants and tokens contain user and password.

    Args:
        fleet: the owner's directory.
        folder: output folder, created with mode 0700.
        installed: folder of the files on the broker's host; ``folder`` by default.
        expected: devices that are not enrolled yet and already get a user.
        upload_bytes: size of one upload, for the limits of the broker's queues; None takes the largest model of the signed
            runs, at least DEFAULT_UPLOAD_BYTES.
        dynamic: whether mosquitto's dynamic security plugin has the users, so that approve and revoke change them; None as
            before.
        plugin: the plugin's file on the broker's host; by default Debian's for this machine's processor.
        home_assistant: Home Assistant's discovery prefix, for a user of its own and the aggregator's sensors; empty for
            neither, None as before.
        websockets: write nginx's file too, and have mosquitto listen behind it; also if the folder has such a file already.

    Raises:
        ConfigError: nginx's file is asked for and the address is no websocket, the prefix is no plain topic, the fleet has
            no aggregator yet, an expected name is not allowed for a device, the CA's certificate and key don't match, or the
            folder is inside the owner's directory or holds other files.
    """
    check_output(fleet.path, folder, ours=WRITTEN, last=CONFIG_FILE)
    if home_assistant:
        check_prefix(home_assistant)
    with fleet.changing():
        nginx = websockets or (folder / NGINX_FILE).exists()
        aggregator, address = _checked(fleet, expected, nginx=nginx)
        private_directory(folder)
        if address.tls:  # first of all: a damaged CA is refused before anything has changed
            _write_certificates(fleet, folder, address.host)
        if dynamic is not None:
            fleet.users.set_dynamic(dynamic)
        if home_assistant is not None:
            fleet.users.set_home_assistant(home_assistant)
        installed = (installed or folder).absolute()
        devices = tuple(dict.fromkeys((*fleet.roster.active(), *expected)))
        prefix = fleet.users.home_assistant
        home = (HOME_ASSISTANT_USER,) if prefix else ()
        workers = tuple(party.name for party in (*fleet.workers, *fleet.keepers))
        users = (OWNER_NAME, ENROL_USER, aggregator, *workers, *home, *devices)
        fleet.users.make()
        if fleet.users.dynamic:
            plugin = plugin or debian_plugin()
            write_private(folder / DOCUMENT_FILE, json.dumps(document(fleet.users, users), indent=1).encode())
            access = pattern_acl(fleet.name, aggregator, prefix)
        else:
            plugin = None
            write_private(folder / PASSWORDS_FILE, "".join(f"{fleet.users.hashed(u)}\n" for u in users).encode())
            access = acl(fleet, devices)
        # The one of the other kind, if this folder had it.
        (folder / (PASSWORDS_FILE if plugin else DOCUMENT_FILE)).unlink(missing_ok=True)
        write_private(folder / "shoal.acl", access.encode())
        size = upload_bytes or largest_upload_bytes(fleet)
        text = config(address, installed, len(devices), size, plugin, behind_nginx=nginx)
        write_private(folder / CONFIG_FILE, text.encode())
        if nginx:
            write_private(folder / NGINX_FILE, nginx_config(address, installed).encode())
        for name in (aggregator, *workers, *home, *devices):
            write_private(folder / CLIENTS / f"{name}.url", f"{fleet.broker_for(name)}\n".encode())
        return Written(folder, users, address.tls)


def largest_upload_bytes(fleet: FleetDirectory) -> int:
    """Return the size of the largest model of the signed runs, at least DEFAULT_UPLOAD_BYTES."""
    plans = signed_plans(fleet, lambda _complaint: None)  # `shoal-fleet show` reports damaged run files
    return max([DEFAULT_UPLOAD_BYTES, *(BYTES_PER_COORDINATE * plan.length for plan in plans)])


def _checked(fleet: FleetDirectory, expected: tuple[str, ...], *, nginx: bool) -> tuple[str, BrokerAddress]:
    """Return the aggregator's name and the broker's address; raise ConfigError as `write_broker_config`."""
    aggregator, address = fleet.roster.aggregator, BrokerAddress.parse(fleet.secrets.broker)
    if aggregator is None:
        raise ConfigError("the fleet has no aggregator yet", hint="shoal-fleet add-aggregator first")
    for name in expected:
        fleet.check_name(name)
    if nginx and not address.path:
        raise ConfigError(
            f"the fleet's address is no websocket: {address}",
            hint="a fleet's address is chosen when it is made: shoal-fleet init --broker wss://HOST/mqtt",
        )
    return aggregator.name, address


def debian_plugin() -> Path:
    """Return the file of the dynamic security plugin in Debian's mosquitto, for this machine's processor."""
    return Path("/usr/lib", sysconfig.get_config_var("MULTIARCH") or "", "mosquitto_dynamic_security.so")


def _write_certificates(fleet: FleetDirectory, folder: Path, host: str) -> None:
    if not (fleet.path / CA_FILE).exists():
        _make_ca(fleet)
    ca, ca_key = _read_ca(fleet.path)
    key = ec.generate_private_key(ec.SECP256R1())
    # A common name has at most 64 characters; clients check the alternative name, which has the whole host.
    builder = _builder(_name(host[:64]), ca.subject, key.public_key(), SERVER_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
    write_private(folder / "server.key", _pem(key))
    server = builder.sign(ca_key, hashes.SHA256())
    write_private(folder / "server.crt", server.public_bytes(serialization.Encoding.PEM))
    write_private(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))


def _make_ca(fleet: FleetDirectory) -> None:
    """Write the CA's key, then its certificate.

    A key without a certificate was left by a crash and has signed nothing, so it may be overwritten.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"shoal {fleet.name} broker CA")
    builder = _builder(name, name, key.public_key(), CA_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    write_private(fleet.path / CA_KEY_FILE, _pem(key))
    made = builder.sign(key, hashes.SHA256())
    write_private(fleet.path / CA_FILE, made.public_bytes(serialization.Encoding.PEM))


def _read_ca(path: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the CA's certificate and its key from the owner's directory.

    Raises:
        ConfigError: one is missing or damaged, or they don't belong together.
    """
    what = f"{path / CA_FILE} and {path / CA_KEY_FILE}"
    try:
        ca = x509.load_pem_x509_certificate(read_private(path / CA_FILE))
        key = serialization.load_pem_private_key(read_private(path / CA_KEY_FILE), None)
    except (ConfigError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{what} can't be used: {error}", hint=CA_HINT) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise ConfigError(f"{what} don't belong together", hint=CA_HINT)
    return ca, key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + life)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


if __name__ == "__main__":
    sys.stdout.write(template_acl("reef"))
