"""A run that is not served for a while: no upload for it is refused for good."""

import dataclasses

import numpy as np

from crypto.seal.envelope import seal_to_group
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Action, Control, Sealed
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from tests.helpers.fleets import (
    aggregator_identity,
    answers,
    group_key,
    inject,
    make_fleet,
    open_upload,
    restart_aggregator,
    seal_upload,
    uploads_of,
)


def advance(fleet, seconds):
    end_s = fleet.now_s + seconds
    fleet.run_until(lambda: fleet.now_s >= end_s, seconds + 1.0)


def refuse(fleet, name):
    """Tell a device, as its aggregator, that the upload it is sending is refused."""
    state = fleet.devices[name].runtime.session.round
    run = fleet.plan.run
    control = Control(
        fleet=fleet.plan.fleet,
        device=name,
        action=int(Action.REFUSED),
        run=run,
        round=state.mark.round,
        transfer=state.transfer,
        missing=(),
        reason="of another run",
    )
    head = Sealed(fleet.plan.fleet, "control", "aggregator", name)
    sealed = seal_to_group(aggregator_identity(fleet), group_key(fleet), head, encode(control))
    for chunk in split(sealed, kind=ChunkKind.CONTROL, round=state.mark.round):
        message = Message(Topics(fleet.plan.fleet).ctl(name), chunk)
        fleet.broker.submit(fleet.client_id("aggregator"), message, lambda: None)


def test_refused_upload_is_offered_again(tmp_path, tap):
    """An upload that was refused is offered again when the round is announced again."""
    with make_fleet(tmp_path / "fleet", faults=tap, quorum=1.0, deadline_s=1000.0) as fleet:
        lost = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.run_until(lambda: fleet.service is not None and len(fleet.service.state.received) == 2, 20)
        refuse(fleet, "dev-00")
        advance(fleet, 2.0)
        assert fleet.devices["dev-00"].runtime.session.round.stage.value == "idle"
        sent = len(uploads_of(fleet, tap, "dev-00"))
        tap.forgive(lost)
        restart_aggregator(fleet)
        fleet.run_until(lambda: fleet.records(), 30)
        assert (fleet.records()[0]["contributed"], fleet.records()[0]["missing"]) == (3, [])
        assert len({bytes(u) for u in uploads_of(fleet, tap, "dev-00")[: sent + 1]}) == 1
        assert fleet.run(60)[-1]["final"]


def test_upload_for_a_later_run(tmp_path, tap):
    """An aggregator whose newest run is over answers for that one, also while a later run's file is away."""
    with make_fleet(tmp_path / "fleet", faults=tap) as fleet:
        fleet.run(60)
        upload, body = open_upload(fleet, "dev-00", uploads_of(fleet, tap, "dev-00")[0])
        told = len(answers(fleet, tap, "dev-00"))
        for values in (np.frombuffer(body, "<f4"), np.full(len(body) // 4, 1e9, "<f4")):  # the second is over the limit
            later = dataclasses.replace(upload, run=fleet.plan.run + 1, run_id=b"L" * 16)
            inject(fleet, "dev-00", seal_upload(fleet, "dev-00", later, values.tobytes()))
            advance(fleet, 5.0)
        assert len(answers(fleet, tap, "dev-00")) == told
        earlier = dataclasses.replace(upload, run_id=b"E" * 16)
        inject(fleet, "dev-00", seal_upload(fleet, "dev-00", earlier, body))
        advance(fleet, 5.0)
        last = answers(fleet, tap, "dev-00")[-1]
        assert (len(answers(fleet, tap, "dev-00")), Action(last.action)) == (told + 1, Action.REFUSED)
