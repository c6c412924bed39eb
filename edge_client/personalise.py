"""`shoal-edge personalise`: do the personal finish of the model that answers again, now and in this process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from edge_client.learning.data import load, split, split_growing
from edge_client.learning.executor.choice import AUTO
from edge_client.learning.finish import finish
from edge_client.learning.model import make_model
from edge_client.learning.reading import AS_FOUND, Reading
from edge_client.learning.standardisation import prepared, scale_for
from edge_client.learning.worker import LOWEST_PRIORITY
from edge_client.membership import DeviceMembership
from edge_client.run.finishing import ended_run, save
from edge_client.run.jobs import split_seed
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.scales import Scales
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_client.storage.finished_models import FinishedModel
    from edge_client.storage.personal_choice import PersonalChoice


def personalise(
    directory: Path,
    source: Path,
    *,
    weight: float = 0.0,
    threads: int = 1,
    reading: Reading = AS_FOUND,
    growing: bool = False,
    executor: str = AUTO,
) -> tuple[FinishedModel, PersonalChoice]:
    """Choose again after the run whose model answers, and return that run and the choice.

    `shoal-edge run` may be running meanwhile: this takes the lowest priority, and the choice is one file.

    Args:
        directory: the device's.
        source: the device's samples, in any format that training takes.
        weight: of the proximal term of Ditto's personal model; 0 leaves that candidate out.
        threads: threads of the executor.
        reading: how the files are read.
        growing: whether the device runs with ``--watch``, which splits the samples in another way.
        executor: auto, onnxruntime or numpy.

    Raises:
        ConfigError: no run has finished on the device, or the run left too little.
        IntegrityError: a file is damaged.
        DataError: the samples are missing or do not fit the task.
        TaskError: the cluster's model can't be scored, or the executor lacks an operator of the task.
        StorageError: the disk is full, or would be.
    """
    membership, store = DeviceMembership(directory), FinishedModels(directory)
    model = answering(store)
    bundle = store.task(model)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    begun_s = time.monotonic()
    ended = ended_run(store, model, bundle, membership, weight)
    scale = scale_for(bundle.manifest, Scales(directory), model.run_id)
    cut = split_growing if growing else split
    shares = prepared(cut(load(source, bundle.manifest, reading), split_seed(membership)), scale)
    done = finish(ended, shares, make_model(executor)(bundle, threads), lambda: False)
    return model, save(store, model, done, took_s=time.monotonic() - begun_s, at_s=int(time.time()))


def answering(store: FinishedModels) -> FinishedModel:
    """Return the finished model that answers.

    Raises:
        ConfigError: no run has finished on the device.
        IntegrityError: the list is damaged.
    """
    model = store.standing().answers
    if model is None:
        raise ConfigError("this device has no finished model yet", hint="let it take part in a run until that ends")
    return model


def back_to_cluster(store: FinishedModels) -> tuple[FinishedModel, PersonalChoice]:
    """Let the cluster's model answer again after the run whose model answers; return that run and the choice.

    Raises:
        ConfigError: no run has finished on the device, or it has not chosen yet.
        IntegrityError: a file is damaged.
        StorageError: the disk is full, or would be.
    """
    model = answering(store)
    found = store.personal(model)
    if found is None:
        raise ConfigError(
            f"this device has not made a choice after run {model.run}: the cluster's model is in use",
            hint="`shoal-edge run --personal off` never makes one",
        )
    choice = found[0].of_cluster()
    store.save_personal(choice, None)
    return model, choice
