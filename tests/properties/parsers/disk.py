"""Parsers of files: task bundles and data that people bring, keys and state that a party wrote and something may have damaged."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import shutil
import sqlite3
import struct
import zlib
from pathlib import Path

import numpy as np

from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher
from aggregator.rounds.snapshot import load as load_snapshot
from aggregator.storage.signed_runs import RunFiles, read_orders
from aggregator.storage.store import Store, read_records, readable
from aggregator.strategies.registry import make_strategy
from crypto.seal import passphrase
from crypto.seal.identity import Identity
from edge_client.config import EdgeConfig
from edge_client.daemon import next_birth
from edge_client.learning.data import load, load_inputs
from edge_client.learning.trainer.messages import Answer, packet_of, parse_answer
from edge_client.membership import DeviceMembership
from edge_client.models.private_values import PrivateValues, parse_values
from edge_client.models.store import FOLDER as MODELS
from edge_client.models.store import INDEX_FILE, STATE_FILES, StateStore
from edge_client.run.beginning import stored_run
from edge_client.storage.finished_models import (
    FOLDER,
    LIST_FILE,
    MODEL_FILES,
    ROLLBACK_FILE,
    TASK_FILES,
    CandidateFit,
    FinishedModels,
    PersonalChoice,
    RollbackChoice,
)
from edge_client.storage.scales import FOLDER as SCALES
from edge_client.storage.scales import Scale, Scales
from edge_client.storage.state import DeviceState
from shoal.address import BrokerAddress
from shoal.owner.console.asking import RequestNumbers
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.broker_users import BrokerUsers
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import CHANGE_FILE, VERSIONS_FILE, Change, FleetSecrets, StoredVersions, VersionSecrets
from shoal.owner.task_compiler.features import declare
from shoal.owner.task_compiler.signed import Source, read_signed, write_signed
from shoal.protocol.codec import decode, encode
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TaskManifest, TensorSpec
from shoal.task.onnx_contents import read_graph
from shoal.task.onnx_graph import bind_input, check_graph
from shoal.util.config import read as read_config
from tests.helpers.datafiles import idx
from tests.helpers.model_states import chain, origins, vector
from tests.properties.parsers.every import Parser, parcelled, parts_of
from tests.properties.parsers.scene import Silent

DATA_SAMPLES = 6
CHEAP_WORK = 1 << 14
"""KiB times passes that a passphrase may cost while parsers are tried; the bound of the format itself is far higher."""


class Disk:
    """Directories of every party of a scene, copied, so that files in them can be replaced by anything.

    Two devices have ended the run, and the aggregator waits for the third, so that it has uploads of an open round.
    """

    def __init__(self, scene, root):
        self.scene = scene
        self.root = root
        stage = scene.fleet.stage
        scene.lose_final_upload("dev-02")
        ended = [DeviceState(stage.device_dir(name)).pending for name in ("dev-00", "dev-01")]
        scene.fleet.run_until(lambda: all(files.load().answered for files in ended), 60)
        scene.fleet.close()
        self.places = {"owner": stage.fleet.path, "device": stage.device_dir("dev-00"), "server": stage.aggregator_dir}
        self.plan = scene.fleet.plan
        self.copies = 0

    def copy(self, party):
        """Return a fresh copy of a party's directory."""
        self.copies += 1
        target = self.root / f"{party}-{self.copies}"
        shutil.copytree(self.places[party], target)
        return target

    def replaced(self, party, file, read, *, seeds=(), name=""):
        """Return a parser of one file of a party: ``read(directory)`` opens the directory."""
        directory = self.copy(party)
        path = directory / file
        found = (path.read_bytes(),) if path.exists() else ()

        def put(data):
            if not path.exists():
                path.touch(mode=0o600)
            path.write_bytes(data)
            return read(directory)

        return Parser(f"{party}'s {name or file}", (*found, *seeds), put)


def parsers(disk):
    """Return the parsers of files."""
    return [*_tasks(disk), *_data(disk), *_owners(disk), *_devices(disk), *_aggregators(disk), *_alone(disk)]


def _tasks(disk):
    bundle = disk.scene.fleet.bundle
    manifest = bundle.manifest.to_toml().encode()
    owner = Identity.generate("owner")
    write_signed(bundle, Source("logistic", {"inputs": 4}), owner, disk.root / "task")

    def graph(data):
        check_graph(data, "g.onnx")
        return bind_input(data, "theta", 4)

    def source(data):
        (disk.root / "task" / "source.json").write_bytes(data)
        return read_signed(disk.root / "task", owner)

    return [
        Parser("task bundle", (bundle.to_bytes(),), TaskBundle.from_bytes),
        Parser("task.toml", (manifest,), TaskManifest.from_toml),
        Parser("onnx graph", (bundle.score, bundle.predict), graph),
        Parser("an onnx graph's contents", (bundle.score, bundle.grad), lambda data: read_graph(data, "g.onnx")),
        Parser("a task's source", ((disk.root / "task" / "source.json").read_bytes(),), source),
    ]


def _data(disk):
    manifest = disk.scene.fleet.bundle.manifest
    width = manifest.input.shape[0]
    x = np.arange(DATA_SAMPLES * width, dtype=np.float32).reshape(DATA_SAMPLES, width)
    y = np.arange(DATA_SAMPLES) % 4
    folder = disk.root / "data"
    folder.mkdir()

    named = dataclasses.replace(
        manifest,
        data=DataDeclaration(
            features=tuple(f"f{i}" for i in range(width)),
            label="y",
            labels=tuple("abcd"),
            standardise="local",
            missing="mean",
        ),
    )

    def through(name, load_=load, task=manifest):
        def read(data):
            (folder / name).write_bytes(data)
            return load_(folder / name, task)

        return read

    def pictures(data):
        (disk.root / "pictures" / "0").mkdir(parents=True, exist_ok=True)
        (disk.root / "pictures" / "0" / "a.png").write_bytes(data)
        task = dataclasses.replace(manifest, input=TensorSpec((1, 2, 3), "float32"))
        return load(disk.root / "pictures", task)

    def features(data):
        (folder / "features.txt").write_bytes(data)
        return declare(features=str(folder / "features.txt"))

    def images(data):
        pixels, labels, *_ = [*parts_of(data), b"", b""]
        (folder / "train-images-idx3-ubyte").write_bytes(pixels)
        (folder / "train-labels-idx1-ubyte").write_bytes(labels)
        return load(folder / "train-images-idx3-ubyte", manifest)

    def packed(data):
        pixels, labels, *_ = [*parts_of(data), b"", b""]
        (folder / "t-images-idx3-ubyte.gz").write_bytes(pixels)
        (folder / "t-labels-idx1-ubyte.gz").write_bytes(labels)
        return load(folder / "t-images-idx3-ubyte.gz", manifest)

    plain, squeezed = io.BytesIO(), io.BytesIO()
    np.savez(plain, x=x, y=y)
    np.savez_compressed(squeezed, x=x, y=y)
    table = "\n".join(",".join(map(str, (*row, label))) for row, label in zip(x, y, strict=True))
    texts = "\n".join(",".join(map(str, (*row, "abcd"[label]))) for row, label in zip(x, y, strict=True))
    pair = idx(x.astype(np.uint8).reshape(DATA_SAMPLES, 2, 3)), idx(y.astype(np.uint8))
    npz = (plain.getvalue(), squeezed.getvalue())
    return [
        Parser("data.npz", npz, through("d.npz")),
        Parser("inputs.npz", npz, through("i.npz", load_inputs)),
        Parser("data.csv", (table.encode(), b"a,b,c,d,e,f,label\n" + table.encode()), through("d.csv")),
        Parser(
            "data.csv with names",
            (texts.encode(), b"f5;f4;y;f0;f1;f2;f3\n1;;a;2;NA;3;4\n"),
            through("n.csv", task=named),
        ),
        Parser("an image", (_png(),), pictures),
        Parser("a file of features", (b"radius,0,50\narea,0,5e3\n", b"# names\nradius\n"), features),
        Parser("IDX files", (parcelled(*pair),), images),
        Parser("IDX files, packed", (parcelled(*(gzip.compress(p) for p in pair)),), packed),
    ]


def _png():
    """Return a grey image of 3 x 2 pixels, made by hand."""

    def chunk(kind, body):
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = chunk(b"IHDR", bytes([0, 0, 0, 3, 0, 0, 0, 2, 8, 0, 0, 0, 0]))
    pixels = chunk(b"IDAT", zlib.compress(bytes([0, 1, 2, 3, 0, 4, 5, 6])))
    return b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")


def _owners(disk):
    def opened(directory):
        fleet = FleetDirectory(directory)
        return (
            fleet.version_key,
            fleet.broadcast,
            fleet.broker,
            fleet.cards(),
            fleet.broker_for("dev-00"),
            fleet.versions,
        )

    def tokens(directory):
        fleet = FleetDirectory(directory)
        store = TokenStore(fleet)
        store.old(0, str)
        return [store.find(p.stem) for p in (directory / "tokens").glob("*.token")]

    owner = disk.places["owner"]
    change = Change((owner / "secrets.bin").read_bytes(), (owner / "roster.signed").read_bytes())
    (token,) = (owner / "tokens").glob("*.token")
    secrets = decode((owner / "secrets.bin").read_bytes(), FleetSecrets)
    assert "version_secret" not in repr(secrets)
    versions = StoredVersions((VersionSecrets(1, bytes(32), bytes(32)),))

    def numbers(directory):
        return RequestNumbers(FleetDirectory(directory)).last()

    return [
        disk.replaced("owner", "requests.count", numbers, seeds=(b"0", b"17")),
        disk.replaced("owner", "owner.key", opened),
        disk.replaced("owner", "secrets.bin", opened),
        disk.replaced("owner", "receiving.bin", opened),
        disk.replaced("owner", VERSIONS_FILE, opened, seeds=(encode(versions),)),
        disk.replaced("owner", "roster.signed", opened),
        disk.replaced("owner", CHANGE_FILE, opened, seeds=(encode(change),)),
        disk.replaced("owner", "broker.key", lambda d: BrokerUsers(d).password("x"), seeds=(bytes(32),)),
        disk.replaced("owner", f"tokens/{token.name}", tokens, name="token"),
    ]


def _devices(disk):
    def joined(directory):
        member = DeviceMembership(directory)
        BrokerAddress.parse(member.broker)
        return (
            member.index,
            member.version_key(member.grant.keys_since),
            member.group.aead(),
        )

    def followed(directory):
        package = DeviceState(directory).load_run()
        return stored_run(package, DeviceMembership(directory))

    def status(directory):
        return {**(DeviceState(directory).load_status() or {})}

    def states(directory):
        store = StateStore.open(directory)
        return store.load() if store else None

    with_states = StateStore.begin(disk.places["device"], chain())
    with_states.commit(origins(vector(1, 2), keys=with_states.peek(1)), applied=0)
    state = str(next((disk.places["device"] / MODELS).glob(STATE_FILES)).relative_to(disk.places["device"]))
    folder = disk.places["device"] / FOLDER
    finished = {
        pattern: str(next(folder.glob(pattern)).relative_to(folder.parent)) for pattern in (MODEL_FILES, TASK_FILES)
    }
    document = encode(RollbackChoice(disk.plan.run_id, disk.plan.run_id))
    choice = document + hashlib.sha256(document).digest()
    (model,) = FinishedModels(disk.places["device"]).models()
    values = PrivateValues(bytes(16), vector(1, 2, 3))
    values.keep(4, vector(4, 5, 6))
    Scales(disk.places["device"]).save(Scale(model.run_id, (1.0, 2.0), (0.5, 1.0)))
    start = f"{FOLDER}/start-{model.run_id.hex()}.bin"
    personal = PersonalChoice(
        version=1,
        run_id=model.run_id,
        choice="alone",
        by_hand=False,
        fits=(CandidateFit("alone", 0.5),),
        samples=4,
        folds=4,
        took_s=1.0,
        made_at_s=1,
        length=3,
    )
    FinishedModels(disk.places["device"]).save_personal(personal, vector(1, 2, 3))
    return [
        disk.replaced("device", "identity.key", joined),
        disk.replaced("device", "receiving.key", joined),
        disk.replaced("device", "membership.bin", joined),
        disk.replaced(
            "device", "membership.next", joined, seeds=((disk.places["device"] / "membership.bin").read_bytes(),)
        ),
        disk.replaced("device", "roster.signed", joined),
        disk.replaced("device", "pending.0.bin", lambda d: DeviceState(d).pending.load()),
        disk.replaced("device", "run.package", followed),
        disk.replaced("device", "model.bin", lambda d: DeviceState(d).load_model()),
        disk.replaced("device", f"{FOLDER}/{LIST_FILE}", lambda d: FinishedModels(d).answering()),
        disk.replaced("device", f"{FOLDER}/{ROLLBACK_FILE}", lambda d: FinishedModels(d).standing(), seeds=(choice,)),
        disk.replaced(
            "device",
            f"{FOLDER}/personal-{model.run_id.hex()}.bin",
            lambda d: FinishedModels(d).personal(model),
            name="personal choice",
        ),
        Parser("a trainer's answer", (packet_of(Answer(error="no")), packet_of(Answer(loss=0.5))), parse_answer),
        Parser("private values", (values.to_bytes(),), lambda data: parse_values(data, bytes(16), 3)),
        disk.replaced(
            "device",
            f"{SCALES}/scale-{model.run_id.hex()}.bin",
            lambda d: Scales(d).load(model.run_id),
            name="scale",
        ),
        disk.replaced("device", start, lambda d: FinishedModels(d).start_of(model), name="start of a run"),
        disk.replaced("device", finished[MODEL_FILES], lambda d: FinishedModels(d).answering(), name="finished model"),
        disk.replaced("device", finished[TASK_FILES], lambda d: FinishedModels(d).answering(), name="finished task"),
        disk.replaced("device", f"{MODELS}/{INDEX_FILE}", states),
        disk.replaced("device", state, lambda d: _undamaged(states(d)), name="model state"),
        disk.replaced("device", "status.json", status),
        disk.replaced("device", "birth", lambda d: next_birth(DeviceMembership(d))),
    ]


def _undamaged(loaded):
    """Return the states that a store has loaded.

    Raises:
        IntegrityError: one of them is damaged.
    """
    states, errors = loaded
    for error in errors:
        raise error
    return states


def _aggregators(disk):
    def joined(directory):
        member = AggregatorMembership(directory)
        return member.group.aead(), member.reason(disk.plan), RunFiles(member).all()

    def ledger(directory):
        member = AggregatorMembership(directory)
        return Publisher(member.identity, member.group, Silent(), directory / "retained.json")

    run = f"run-{disk.plan.run:06d}"

    def database(directory):
        store = Store(directory / run, disk.plan)
        try:
            return _all_of(store, directory / run, disk.plan)
        finally:
            store.close()

    return [
        disk.replaced("server", "membership.bin", joined),
        disk.replaced("server", "roster.signed", joined),
        disk.replaced("server", "roster.least", joined),
        disk.replaced("server", "runs/000001.run", joined),
        disk.replaced("server", "retained.json", ledger),
        disk.replaced("server", "orders.json", read_orders, seeds=(b'{"accepted": 7, "orders": {"00": "pause"}}',)),
        disk.replaced("server", f"{run}/run.sqlite", database),
        *(_row(disk, run, *where) for where in ROWS),
    ]


ROWS = (
    ("snapshot", "head", "id = 1"),
    ("snapshot", "state", "id = 1"),
    ("rounds", "record", "round = 1"),
    ("uploads", "header", "device = 'dev-00' AND round = (SELECT max(round) FROM uploads)"),
    ("uploads", "digest", "device = 'dev-00'"),
    ("uploads", "start", "device = 'dev-00' AND round = (SELECT max(round) FROM uploads)"),
    ("uploads", "checksum", "device = 'dev-00' AND round = (SELECT max(round) FROM uploads)"),
    ("facts", "value", "name = 'plan'"),
    ("facts", "value", "name = 'seed'"),
)
BYTES = ("header", "digest", "value")


def _all_of(store, directory, plan):
    """Read everything that a store holds, as the aggregator does when it starts."""
    snapshot = store.restore()
    if snapshot is not None:
        with readable(directory):
            load_snapshot(make_strategy(plan).state_type, snapshot.document, snapshot.vectors)
        store.uploads(snapshot.round)
    return store.records(), read_records(directory)


def _row(disk, run, table, column, where):
    directory = disk.copy("server") / run
    database = sqlite3.connect(directory / "run.sqlite", isolation_level=None)
    (found,) = database.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()
    seed = found if isinstance(found, bytes) else str(found).encode()

    def read(data):
        value = data if column in BYTES else data.decode("utf-8", "replace")
        database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
        store = Store(directory, disk.plan)
        try:
            return _all_of(store, directory, disk.plan)
        finally:
            store.close()

    return Parser(f"aggregator's {table}.{column} where {where.split()[0]} {where.split()[2]}", (seed,), read)


def _alone(disk):
    toml = b'[edge]\ndir = "d"\ndata = "x.npz"\nthreads = 2\nonce = true\n'
    head = struct.pack("<4sIII16s", passphrase.MAGIC, 8, 1, 1, bytes(16))
    lock = passphrase.Lock(b"long enough")
    nonce = bytes(12)
    locked = head + nonce + lock._cipher(head).encrypt(nonce, b"secret", head + b"file")

    def config(data):
        path = disk.root / "edge.toml"
        path.write_bytes(data)
        return read_config(EdgeConfig, file=path, environment={}).config()

    def unlock(data):
        asked = struct.unpack("<III", data[4:16].ljust(12, b"\0"))
        if asked[0] * asked[1] > CHEAP_WORK:
            return None
        return passphrase.Lock(b"long enough").open("file", data)

    identity = Identity.generate("dev-1").reveal()
    return [
        Parser("configuration file", (toml,), config),
        Parser("file under a passphrase", (locked,), unlock),
        Parser("key file", (identity,), lambda d: Identity.from_bytes(d, Path("k"))),
    ]
