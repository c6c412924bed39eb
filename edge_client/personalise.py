"""`shoal-edge personalise`: do the personal finish of the model that answers again, now and in this process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from edge_client.config import ditto_weight
from edge_client.learning.data import load, split, split_growing
from edge_client.learning.finish import finish
from edge_client.learning.standardisation import prepared, scale_for
from edge_client.learning.trainer.choice import make_model
from edge_client.learning.worker import LOWEST_PRIORITY
from edge_client.membership import DeviceMembership
from edge_client.run.finishing import ended_run, save
from edge_client.run.jobs import split_seed
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.scales import Scales
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from edge_client.config import EdgeConfig
    from edge_client.storage.finished_models import FinishedModel
    from edge_client.storage.personal_choice import PersonalChoice


def personalise(config: EdgeConfig) -> tuple[FinishedModel, PersonalChoice]:
    """Choose again after the run whose model answers, and return that run and the choice.

    `shoal-edge run` may be running meanwhile: this takes the lowest priority, and the choice is one file.

    Raises:
        ConfigError: no run has finished on the device, or the run left too little.
        IntegrityError: a file is damaged.
        DataError: the samples are missing or do not fit the task.
        TaskError: the cluster's model can't be scored, or the executor lacks an operator of the task.
        StorageError: the disk is full, or would be.
    """
    membership, store = DeviceMembership(config.dir), FinishedModels(config.dir)
    model = answering(store)
    bundle = store.task(model)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    begun_s = time.monotonic()
    ended = ended_run(store, model, bundle, membership, ditto_weight(config.personal))
    scale = scale_for(bundle.manifest, Scales(config.dir), model.run_id)
    cut = split_growing if config.watch else split
    shares = prepared(cut(load(config.data, bundle.manifest, config.reading), split_seed(membership)), scale)
    done = finish(ended, shares, make_model(config.executor, config.own_trainer)(bundle, config.threads), lambda: False)
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
