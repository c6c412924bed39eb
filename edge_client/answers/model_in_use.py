"""The model that a device answers with, as files for other programs of its machine, and a program that runs for each new one.

    DIR/model.onnx -> in-use/current/model.onnx
    DIR/model.json -> in-use/current/model.json
    DIR/in-use/current -> 5c0e..., the newest version
    DIR/in-use/5c0e.../     model.onnx and model.json
    DIR/in-use/91ab.../     those of the version before

One rename of the link ``current`` puts both files of a version in place, after they are on disk. So a power cut leaves the old
pair or the new one, and a reader who resolves ``current`` first reads two files that belong together. The version before stays
until the next one is written; a file that is open can be read to its end in any case. A version is named by the SHA-256 of its
model.json, which has the SHA-256 of the model.

The device's directory is of mode 0700, which nobody else enters. The files have the mode 0644 and the folders 0755 whatever the
umask is, so that users who are let in can read them.

The operator alone sets the program (``--on-model``). It runs as the device's user, without a shell:

    PROGRAM DIR/model.onnx DIR/model.json RUN

One runs at a time. If models change while it runs, it is run once more for the newest when it has ended. It is ended after
LONGEST_S. Its failure stands in the device's status, and is not tried again before the next model or the next start; nothing of
it reaches a round. ``on-model.json`` names the model for which it last ended well, so that a start runs it for a newer one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from edge_client.answers.inference import facts_of, in_use, onnx_pieces
from edge_client.answers.loaded_model import MODEL_FILE
from edge_client.learning.trainer.process import LOG_HINT, how_it_ended, own_environment
from edge_client.storage.finished_models import FOLDER as FINISHED
from edge_client.storage.state import ON_MODEL_FILE, load_json, model_bytes
from shoal.digests import sha256
from shoal.errors import ShoalError, reason_of
from shoal.util.console import second
from shoal.util.files import PARENT_DIR_MODE, exclusive, sync_directory, write_atomic, write_failed

LOG = logging.getLogger("shoal.edge")
FOLDER: Final = "in-use"
CURRENT: Final = "current"
FACTS_FILE: Final = "model.json"
OWN_CODE_FILE: Final = "model.bin"
"""The model of a task with own training code: its parameters, float32 little-endian, in the order of model.json."""
FILE_MODE: Final = 0o644
WAIT_S: Final = 60.0
"""Longest wait for another program that writes a large model to a slow disk, in seconds."""
LONGEST_S: Final = 300.0
"""Longest time for the operator's program, in seconds; after it the program hangs."""
NAME_CHARS: Final = 32
TICK_NS: Final = 100_000_000
"""Longer than any system's clock tick, in nanoseconds."""


def publish(directory: Path) -> None:
    """Put the model that `predict` answers with into its place, unless it is there; do nothing before the first run has ended.

    `shoal-edge run`, `rollback` and `personalise` call it after each change, and may do so at once.

    Raises:
        IntegrityError: a file of the model is damaged.
        TaskError: the model holds numbers that are not finite.
        ConfigError: the files can't be written; StorageError if the disk is full. The version before stays in use.
    """
    folder = directory / FOLDER
    try:
        _make(folder)
        with exclusive(folder, wait_s=WAIT_S, hint="try again"):
            _replace(directory, folder)
    except OSError as error:
        raise write_failed(folder, error) from error


def _replace(directory: Path, folder: Path) -> None:
    chosen = in_use(directory)
    if chosen is None:
        return
    bundle, model = chosen.bundle, chosen.at(None)
    facts: dict[str, Any] = {**facts_of(bundle), **chosen.facts()}
    if bundle.manifest.trainer is None:
        name, pieces = MODEL_FILE, onnx_pieces(bundle, model.theta, chosen.scale, facts)
    else:
        name, pieces = OWN_CODE_FILE, (b"", model_bytes(model)[1])
        facts["parameters"] = [{"name": p.name, "shape": p.shape} for p in bundle.manifest.parameters]
        facts["standardised_by"] = None if chosen.scale is None else [chosen.scale.means, chosen.scale.deviations]
    document = {"file": name, "sha256": sha256(*pieces).hex(), **facts}
    text = json.dumps(document, indent=2, allow_nan=False).encode()
    version, before = sha256(text).hex()[:NAME_CHARS], (folder / CURRENT).resolve().name
    if version == before:
        return
    _make(folder / version)
    for file, parts in ((name, pieces), (FACTS_FILE, (text,))):
        write_atomic(folder / version / file, *parts, sync_name=False)
        (folder / version / file).chmod(FILE_MODE)
    for file in (MODEL_FILE, FACTS_FILE):
        _link(directory / file, f"{FOLDER}/{CURRENT}/{file}")
    for changed in (folder / version, folder, directory):
        sync_directory(changed)
    _link(folder / CURRENT, version)
    sync_directory(folder)
    for old in folder.iterdir():
        if old.is_dir() and old.name not in (version, before, CURRENT):
            shutil.rmtree(old)


def _make(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(PARENT_DIR_MODE)


def _link(path: Path, to: str) -> None:
    """Let ``path`` be a link to ``to``, in one step."""
    new = path.with_name(f".{path.name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(to)
    new.replace(path)


class ModelInUse:
    """Follows the model in use of one device while it serves.

    Args:
        directory: the device's.
        program: the operator's; None if there is none.
    """

    def __init__(self, directory: Path, program: Path | None) -> None:
        self._directory = directory
        self._program = program
        self._seen = 0
        self._facts: dict[str, Any] = {}
        self._done = self._tried = (load_json(directory / ON_MODEL_FILE) or {}).get("model")
        self._process: subprocess.Popen[bytes] | None = None
        self._run, self._due_s = "", 0.0

    def publish(self) -> None:
        """Publish the model that answers if the finished models have changed since the last call; a failure is logged."""
        # Each change of the list, of a choice or of a personal model renames a file in this folder.
        finished = self._directory / FINISHED
        changed = finished.stat().st_mtime_ns if finished.is_dir() else 0
        if changed == self._seen:
            return
        # Files' times are those of the clock's last tick: a change in the same tick looks like none, so this looks once more.
        self._seen = changed if abs(time.time_ns() - changed) > TICK_NS else 0
        try:
            publish(self._directory)
        except ShoalError as error:
            facts = {"reason": reason_of(error), "hint": error.hint}
            LOG.warning("the model in use can't be replaced", extra={"kv": facts})
        self._facts = load_json(self._directory / FACTS_FILE) or {}

    def keep_up(self, now_s: float) -> bool:
        """Publish as `publish`, look after the program, and run it if there is a new model; return whether it runs.

        Args:
            now_s: a clock that never goes back.

        Raises:
            StorageError: the disk is full or fails, so that it can't be noted how the program has ended.
        """
        self.publish()
        if self._process is not None:
            self._look_after(self._process, now_s)
        if self._program and self._process is None and self._facts.get("sha256") not in (None, self._tried):
            self._begin(self._program, now_s)
        return self._process is not None

    def close(self) -> None:
        """End the program if it runs, with those that it has begun; the next start runs it again."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _begin(self, program: Path, now_s: float) -> None:
        self._tried, self._run, self._due_s = self._facts["sha256"], str(self._facts.get("run")), now_s + LONGEST_S
        files = (str(self._directory.absolute() / name) for name in (MODEL_FILE, FACTS_FILE))
        try:
            self._process = subprocess.Popen(
                (str(program.absolute()), *files, self._run),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints goes to the device's log
                env=own_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._note(f"can't be started: {error.strerror}")

    def _look_after(self, process: subprocess.Popen[bytes], now_s: float) -> None:
        status = process.poll()
        if status is None and now_s < self._due_s:
            return
        self.close()
        how = f"has not ended for {LONGEST_S:g} seconds" if status is None else how_it_ended(status)
        self._note("" if status == 0 else how)

    def _note(self, failure: str) -> None:
        """Write how the program has ended to the log and the status; ``failure`` is empty after a good end."""
        if failure:
            facts = {"program": self._program, "run": self._run}
            LOG.warning("the program for new models %s", failure, extra={"kv": facts})
        else:
            self._done = self._tried
        error = {"error": f"{self._program} {failure}", "hint": LOG_HINT} if failure else {}
        told = {"model": self._done, "run": self._run, "at": second(int(time.time())), **error}
        write_atomic(self._directory / ON_MODEL_FILE, json.dumps(told).encode())
