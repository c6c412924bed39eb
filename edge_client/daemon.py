"""`shoal-edge run`: one loop that passes the events of the broker and the worker to the device's runtime."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from crypto.mask.kernel import installed
from edge_client.answers.model_in_use import ModelInUse
from edge_client.config import EdgeConfig
from edge_client.learning.data import files_of
from edge_client.learning.executor.choice import choose
from edge_client.learning.worker import LOWEST_PRIORITY, ThreadWorker
from edge_client.membership import REVOKED_HINT, DeviceMembership
from edge_client.protocol.presence import presence, witness
from edge_client.runtime import DeviceRuntime
from edge_client.storage.state import DeviceState
from shoal.address import BrokerAddress
from shoal.errors import ShoalError, StorageError, TakenOverError, UntrustedError
from shoal.transport.base import TakenOver
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MqttTransport
from shoal.transport.pacing import Pace, uniform
from shoal.util.console import second
from shoal.util.files import serving, write_atomic
from shoal.util.process import settle
from shoal.util.service_manager import ServiceManager

LOG = logging.getLogger("shoal.edge")
POLL_S: Final = 0.5
BIRTH_FILE: Final = "birth"
MOST_STEP_S: Final = 600.0
"""A training step, or the scoring before it, that takes longer has hung: the slowest device known takes a second."""
MOST_BIRTHS: Final = (1 << 64) - 1
"""Incarnations (births) are 64 bits wide on the wire."""


def next_birth(membership: DeviceMembership) -> int:
    """Return the device's incarnation, a number that grows with every start even if the clock is wrong; store it."""
    path = membership.directory / BIRTH_FILE
    # The clock helps if the file was lost, the file if the clock was set back.
    birth = max(_last_birth(path) + 1, time.time_ns())
    write_atomic(path, str(birth).encode())
    return birth


def _last_birth(path: Path) -> int:
    """Return the stored incarnation; 0 if absent, or the file is damaged."""
    if not path.exists():
        return 0
    try:
        last = int(path.read_text(encoding="ascii"))
        if not 0 <= last < MOST_BIRTHS:
            raise ValueError("out of range")
    except ValueError as error:
        LOG.warning("the number of this device's last start is damaged", extra={"kv": {"file": path, "reason": error}})
        return 0
    return last


def serve(config: EdgeConfig) -> None:
    """Take part in the fleet's runs until stopped; with ``once``, until a run that was not reported before has ended.

    Raises:
        NotEnrolledError: the device belongs to no fleet.
        BrokerUnreachableError: the first connection failed.
        ConfigError: another program serves this directory, or the executor asked for is not installed.
        UntrustedError: the owner has revoked this device.
        TakenOverError: another program, which began before this one, has the device's identity.
        DataError: its data are missing or of no known format.
        StorageError: the disk is full or fails; `shoal-edge status` says so.
    """
    DeviceMembership(config.dir)  # check first: leave no lock file in a directory that is not a device's
    files_of(config.data)
    with serving(config.dir, hint="one `shoal-edge run` serves a device; end the other first"):
        try:
            _serve(config)
        except StorageError as error:
            DeviceState(config.dir).save_trouble(error, second(int(time.time())))
            raise


def _serve(config: EdgeConfig) -> None:
    membership, executor, manager = (
        DeviceMembership(config.dir),
        choose(config.executor),
        ServiceManager.from_environment(),
    )
    inbox = Inbox()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(None))
    birth = next_birth(membership)
    DeviceState(config.dir).clear_trouble()
    address = BrokerAddress.of(config, membership.grant)
    transport = MqttTransport(
        address,
        f"shoal-{membership.fleet}-{membership.name}",
        inbox.put,
        will=presence(membership, birth, online=False),
        manual_ack=True,
        pace=Pace.of_kbps(config.max_kbps),
        witness=witness(membership, birth),
    )
    worker = ThreadWorker()
    runtime = DeviceRuntime(
        config,
        membership,
        transport,
        worker,
        birth=birth,
        results=inbox.put,
        uniform=uniform,
        finish_worker=ThreadWorker(nice=LOWEST_PRIORITY) if config.finishes else None,
        broker=str(address),
    )
    models = ModelInUse(config.dir, config.on_model)
    models.publish()
    runtime.start()
    transport.start(require=True)
    masks = "numpy" if installed() is None else "compiled"
    facts = {"device": membership.name, "fleet": membership.fleet, "executor": executor, "masks": masks}
    LOG.info("connected", extra={"kv": facts})
    manager.ready(f"connected to {address}")
    try:
        with closing(models):
            _loop(config, runtime, inbox, membership.name, models, lambda: _tell(manager, runtime, worker))
    except BaseException:
        with suppress(ShoalError):  # a failure to close must not hide the error that ended the loop
            runtime.close()
        raise
    manager.stopping()
    runtime.close()
    # Only after a clean close: if the process is killed before, the next one reports the end of the run again.
    runtime.remember_end()


def _tell(manager: ServiceManager, runtime: DeviceRuntime, worker: ThreadWorker) -> None:
    """Tell the service manager that loop and training go on: a step of training that hangs is noticed too."""
    now_s = time.monotonic()
    if worker.quiet_s() < MOST_STEP_S:
        manager.alive(now_s)
    if manager.wants_status(now_s):
        manager.status(runtime.state_line, now_s)


def _loop(
    config: EdgeConfig,
    runtime: DeviceRuntime,
    inbox: Inbox,
    name: str,
    models: ModelInUse,
    turned: Callable[[], None] = lambda: None,
) -> None:
    """Pass events to the runtime until stopped, or with ``once`` until a run has ended and has had its personal finish.

    With ``once`` the operator's program for new models has ended too. After each turn it calls ``turned``.

    With ``once``, the end is recorded as reported only after the runtime is closed. A process that is killed before that
    ends at once when it is started again.
    """
    settled, told, look_s = None, False, 0.0
    while not (config.once and runtime.runs_done and not runtime.finishing and told):
        for event in inbox.batch(POLL_S):
            if event is None:
                LOG.info("stopping")
                return
            if isinstance(event, TakenOver):
                raise TakenOverError(
                    f"another device connected as {name}",
                    hint="it began before this one: each device needs its own directory, and this one was copied",
                )
            if callable(event):
                event()
            else:
                runtime.on_event(event, time.monotonic())
        event = None  # a callback holds the upload that it has handed over
        if runtime.revoked:
            raise UntrustedError("the owner has revoked this device", hint=REVOKED_HINT)
        # Before a personal finish begins: each of the two takes memory for a few models.
        now_s = time.monotonic()
        if config.once or now_s >= look_s:  # with `once`, the model of the run's end is never missed
            told, look_s = not models.keep_up(now_s), now_s + POLL_S
        runtime.tick(time.monotonic())
        turned()
        if not config.once:
            runtime.remember_end()
        if runtime.following != settled:  # the objects of a new run stay: take them out of garbage collection
            settled = runtime.following
            settle()
