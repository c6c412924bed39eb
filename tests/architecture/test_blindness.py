"""The aggregator can't reach the mask: held by import contracts, by a blocked run, by its image and by its configuration."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from aggregator.config import AggregatorConfig
from shoal.errors import ConfigError
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.process_fleet import Stage
from shoal.transport.local_broker import start_broker
from shoal.util.config import read
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.trees import LAB, ONE_THREAD, PACKAGES, ROOT, lay_out_image, python

FORBIDDEN = (
    "crypto.mask",
    "edge_client",
    "shoal.owner",
    "shoal.task",
    "shoal.simulation",
    "shoal.demo",
    "shoal_lab",
)
IMAGE = "deploy/docker/aggregator.Dockerfile"
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

BLOCKED = f"""
import sys
FORBIDDEN = {FORBIDDEN!r}
class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == f or name.startswith(f + ".") for f in FORBIDDEN):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import atexit
atexit.register(lambda: print("loaded", *sorted(sys.modules)))
from aggregator.cli import main
main()
"""


def copy_of_the_tree(target):
    for package in (*PACKAGES, LAB):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def test_import_contracts_hold():
    """lint-imports finds no broken contract."""
    done = python(LINT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("aggregator/storage/store.py", "from crypto.mask.kdf import SALT"),
        ("aggregator/cli.py", "import edge_client.storage.state"),
        ("crypto/__init__.py", "from crypto.mask.secret import MaskSecret"),
        ("shoal/util/files.py", "import shoal.owner.keys.directory"),
        ("shoal/protocol/topics.py", "from shoal.util.files import write_atomic"),
        ("edge_client/protocol/round_state.py", "import torch"),
        ("aggregator/rounds/engine.py", "import torch"),
    ],
)
def test_import_contracts_notice_a_breach(tmp_path, module, line):
    """The contracts are not empty: each forbidden import breaks one, also a re-export in crypto/__init__."""
    tree = copy_of_the_tree(tmp_path / "tree")
    with (tree / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = python(LINT, cwd=tree)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


@pytest.mark.process
@pytest.mark.broker
def test_run_without_mask_device_and_owner(tmp_path):
    """The daemon serves real devices from the image's tree alone, splits them rightly, and learns no secret of theirs."""
    image = lay_out_image(IMAGE, tmp_path / "image")
    assert not (image / "crypto" / "mask").exists()
    names = ("dev-00", "dev-01", "dev-02", "dev-03")
    bundle = logistic_bundle()
    origin = np.random.default_rng(7).standard_normal((1, bundle.length)).astype(np.float32)
    options = a_recipe(
        "cfl",
        settings={"validate": "off", "eps1": "10"},
        rounds=3,
        local=LocalTraining(epochs=2, batch_size=16, lr=0.2),
        min_contributors=2,
        seed=1,
    )
    with start_broker("auto", tmp_path / "broker") as broker, Stage(tmp_path / "stage", broker.url, names) as stage:
        plan = stage.add_run(bundle, origin, options)
        for i, name in enumerate(names):
            x, _ = samples(60, seed=i)
            data = tmp_path / f"{name}.npz"
            np.savez(data, x=x, y=(x[:, :3].argmax(1) + i % 2) % 3)
            stage.start_device(name, data)
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, "serve", str(stage.aggregator_dir), "--once"],
            cwd=image,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(image)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        records = stage.records(plan.run)
        secrets = stage.fleet.secrets
        disk = {p: p.read_bytes() for p in stage.aggregator_dir.rglob("*") if p.is_file()}

    loaded = done.stdout.split()[1:]
    assert "aggregator.run_service" in loaded
    assert not [m for m in loaded if any(m == f or m.startswith(f + ".") for f in FORBIDDEN)]
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["tested"] > 0
    clusters = records[-1]["clusters"]
    assert clusters["dev-00"] == clusters["dev-02"] != clusters["dev-01"] == clusters["dev-03"]
    for what in (secrets.version_secret, origin.tobytes(), bundle.score):
        assert not [p for p, data in disk.items() if what in data]


def test_configuration_has_no_place_for_keys():
    """Its fields are pinned: a new one must be looked at here. ``key`` is the TLS key's path, ``http_token`` the token file's.

    ``broker`` and ``proxy`` may hold this program's own password there.
    """
    assert [f.name for f in dataclasses.fields(AggregatorConfig)] == [
        "dir",
        "broker",
        "ca",
        "cert",
        "key",
        "proxy",
        "device",
        "once",
        "log",
        "http",
        "http_token",
        "home_assistant",
        "shards",
        "interface",
        "chunk_bytes",
    ]


@pytest.mark.parametrize("name", ["version_secret", "version-secret", "secret", "content_key", "mask"])
def test_configuration_refuses_unknown_keys(tmp_path, name):
    """A secret in the file is an error, not something to ignore."""
    file = tmp_path / "aggregator.toml"
    file.write_text(f'[aggregator]\ndir = "/tmp"\n{name} = "00"\n')
    with pytest.raises(ConfigError, match="unknown key"):
        read(AggregatorConfig, file=file, environment={})


def test_grant_has_no_field_for_a_secret():
    """The fields of the aggregator's grant are pinned by name; task and models in the package ``order`` are sealed."""
    names = {f.name for f in dataclasses.fields(AggregatorGrant)}
    assert names == {"fleet", "owner_key", "broker", "broker_ca", "roster", "keys_since", "broadcast_key", "order"}


def test_device_image_holds_no_other_party(tmp_path):
    """And the command line of the device answers from that image."""
    image = lay_out_image("deploy/docker/edge.Dockerfile", tmp_path / "image")
    assert sorted(p.name for p in image.iterdir() if p.is_dir()) == ["crypto", "edge_client", "shoal"]
    assert not [name for name in ("owner", "simulation", "demo") if (image / "shoal" / name).exists()]
    done = python("import sys; sys.argv = ['x', '--help']; from edge_client.cli import main; main()", cwd=image)
    assert done.returncode == 0, done.stderr
