"""A device that can't do its part says so: the round does not wait for it, and the aggregator can name it."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.quorum_and_deadline import shortage
from aggregator.run_log import waiting_for
from crypto.seal.envelope import open_from_member, read_head, seal_to_member
from edge_client.config import EdgeConfig
from edge_client.doctor import diagnose
from edge_client.learning.data import Dataset
from edge_client.status import status_lines
from edge_client.storage.state import DeviceState
from shoal.protocol.channels import DECLINE
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Decline, DeclineReason, Sealed
from shoal.protocol.recipe import DEFAULTS
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from tests.helpers.fleets import (
    aggregator_identity,
    announcements,
    device_identity,
    grouped_data,
    make_fleet,
    reasons,
    restart_aggregator,
    restart_device,
    uploads_of,
    whole,
)

ODD = "dev-02"
DEADLINE_S = 60.0
LIVENESS = {"running": True, "connected": True, "broker": "b", "since": ""}


def unfit(batch):
    """The same samples with one input too few."""
    return Dataset(batch.x[:, 1:].copy(), batch.y)


def exploding(batch):
    """Samples on which no loss is finite."""
    return Dataset(np.full_like(batch.x, 1e30), batch.y)


def data_with(change, count=4):
    data = grouped_data(count)
    return {**data, ODD: change(data[ODD])}


def fleet_of(tmp_path, change, *, tap=None, **options):
    settings = {"quorum": 0.5, "deadline_s": DEADLINE_S, **options}
    return make_fleet(tmp_path / "fleet", data_with(change), faults=tap, **settings)


def declines_of(fleet, tap, name=ODD):
    """Return a device's declines, as the aggregator decodes them."""
    found = []
    chunks = [p.payload for p in tap.sent(client=fleet.client_id(name), ending="/up")]
    for sealed in whole([c for c in chunks if parse(c)[0].kind is ChunkKind.DECLINE]):
        head, at = read_head(sealed)
        key = device_identity(fleet, name).member.sign_key
        message, body = open_from_member(aggregator_identity(fleet), sealed, head, at, key)
        assert (head.purpose, len(body)) == (DECLINE.purpose, 0)
        found.append(decode(message, Decline))
    return found


@pytest.mark.parametrize(("change", "reason"), [(unfit, "data"), (exploding, "task")])
def test_nobody_waits_for_an_unable_device(tmp_path, change, reason, caplog, tap):
    """Nobody waits for a device that can't."""
    with fleet_of(tmp_path, change, tap=tap) as fleet:
        records = fleet.run(DEADLINE_S)
        assert fleet.now_s < DEADLINE_S / 2
        rounds = [r for r in records if not r["final"]]
        assert [(r["contributed"], r["missing"], r["declined"]) for r in rounds] == [(3, [ODD], {ODD: reason})] * 3
        declines = declines_of(fleet, tap)
        # An error's text may name files and values; a decline has no field for it.
        nonce, word = announcements(fleet, tap)[0].nonce, int(DeclineReason[reason.upper()])
        assert declines[0] == Decline("demo", ODD, fleet.plan.run_id, nonce, word)
        # The final round is announced once more with its checkpoints.
        assert len(declines) <= len(announcements(fleet, tap))
        said = list(dict.fromkeys(d.nonce for d in declines))
        told = list(dict.fromkeys(a.nonce for a in announcements(fleet, tap)))
        assert said in (told, told[:-1])  # once each; who failed to train can still take part in the final round
    warnings = [r for r in caplog.records if r.getMessage() == "devices can't do their part"]
    assert [ODD in w.kv["devices"] for w in warnings] == [True]


@pytest.mark.parametrize("least", [2, 3])
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_unable_device_stops_small_fleets(tmp_path, odd, least):
    """With the defaults of `run start` for quorum and deadline."""
    data = grouped_data(3)
    name = list(data)[odd]
    with make_fleet(
        tmp_path / "fleet", {**data, name: unfit(data[name])}, quorum=DEFAULTS.quorum, min_contributors=least
    ) as fleet:
        if least == 2:
            records = fleet.run(DEADLINE_S)
            assert fleet.now_s < DEADLINE_S / 2, "no round waits for its deadline"
            assert [(r["contributed"], r["declined"]) for r in records] == [(2, {name: "data"})] * len(records)
            return
        fleet.run_until(lambda: fleet.now_s > 3 * DEADLINE_S, 4 * DEADLINE_S)
        assert fleet.records() == []
        short = shortage(fleet.service.state)
        assert short.reason == "2 answered and 3 must (min_contributors 3)"
        assert short.unable == (name,)


def test_others_learn_as_without_it(tmp_path):
    """The others learn what they would without it, and something else than with its data."""
    data, found = grouped_data(4), {}
    without = {name: batch for name, batch in data.items() if name != ODD}
    for case, given in (("unfit", data_with(unfit)), ("without", without), ("all", data)):
        with make_fleet(tmp_path / case, given, quorum=0.5, deadline_s=DEADLINE_S) as fleet:
            fleet.run(DEADLINE_S)
            found[case] = fleet.model("dev-00").theta
    assert np.allclose(found["unfit"], found["without"], atol=1e-5)
    assert not np.allclose(found["unfit"], found["all"], atol=1e-5)


def test_round_that_all_decline_goes_on(tmp_path):
    """A round that all decline says so and goes on with whoever is mended."""
    data = {name: unfit(batch) for name, batch in grouped_data(3).items()}
    with make_fleet(tmp_path / "fleet", data, quorum=1.0, rounds=1) as fleet:
        fleet.run_until(lambda: fleet.service is not None and "fit" in fleet.service.status(), DEADLINE_S)
        fleet.settle()
        assert fleet.service.status() == "round 1: 0 of 3; data do not fit the task: dev-00, dev-01, dev-02"
        for name, batch in grouped_data(3).items():
            restart_device(fleet, name, batch)
        records = fleet.run(DEADLINE_S)
        assert records[0]["contributed"] == 3
        assert records[0]["declined"] == {}


def test_restart_with_other_data_waits(tmp_path, caplog):
    """The stored run is over, and its task would end the program; the samples fit that of the next run."""
    with make_fleet(tmp_path / "fleet", grouped_data(3), rounds=1) as fleet:
        fleet.run(DEADLINE_S)
        for name, batch in grouped_data(3).items():
            restart_device(fleet, name, unfit(batch))
        fleet.settle()
        waits = "this device can't do the task of the stored run, and waits for a later run"
        assert [r.getMessage() for r in caplog.records].count(waits) == 3
        for name, batch in grouped_data(3).items():  # mended: it takes the stored run up again
            restart_device(fleet, name, batch)
        fleet.settle()
        assert [r.getMessage() for r in caplog.records].count(waits) == 3
        assert fleet.devices["dev-00"].runtime.following == fleet.plan.run


def test_device_shows_why_it_can_not(tmp_path, caplog):
    """Its status has the reason, `doctor` compares with the refused task, and nothing reads as an attack on a topic."""
    with make_fleet(tmp_path / "fleet", data_with(unfit), quorum=0.5, rounds=30) as fleet:
        files = DeviceState(fleet.stage.device_dir(ODD))
        fleet.run_until(lambda: fleet.closed() == 2, DEADLINE_S)
        fleet.settle()
        told = files.load_status()["refused"]
        assert "samples of shape (5,)" in told["reason"]
        assert told["run"] == fleet.plan.run
        (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("this device can't do")]
        assert said == f"this device can't do run {told['run']}: {told['reason']}"
        assert f"can't do run {told['run']}: {told['reason']}" in status_lines(files.load_status() | LIVENESS)
        assert not [r for r in caplog.records if r.getMessage() == "refused"]
        data = tmp_path / "d.npz"
        np.savez(data, x=np.zeros((9, 3), np.float32), y=np.zeros(9, np.int64))
        assert "the task expects" in checked_data(files, data).detail
        restart_device(fleet, ODD, grouped_data(4)[ODD])
        fleet.run_until(lambda: fleet.devices[ODD].runtime.following == fleet.plan.run, DEADLINE_S)
        fleet.run_until(lambda: "refused" not in files.load_status(), DEADLINE_S)
        assert files.load_refused() is None


def checked_data(files, data):
    """Return what `shoal-edge doctor` finds out about samples."""
    found = diagnose(EdgeConfig(files.directory, data, broker="mqtt://127.0.0.1:1"), with_data=True)
    return next(c for c in found if c.name == "data")


def test_restarted_aggregator_is_told_again(tmp_path, tap):
    """It restarts in the middle of the round, with one device still to answer."""
    with fleet_of(tmp_path, exploding, tap=tap, rounds=1) as fleet:
        late = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.run_until(lambda: declines_of(fleet, tap), 20)
        fleet.settle()
        restart_aggregator(fleet)
        fleet.settle()
        assert waiting_for(fleet.service.state).endswith("training failed: dev-02")
        tap.forgive(late)
        records = fleet.run(DEADLINE_S)
        assert records[0]["declined"] == {ODD: "task"}
        assert fleet.now_s < DEADLINE_S


@pytest.fixture
def waiting(tmp_path, caplog, tap):
    """A fleet in round 2 that waits for one upload; forged declines must change nothing."""
    with make_fleet(tmp_path / "fleet", grouped_data(3), faults=tap, rounds=2, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 30)
        tap.lose(client=fleet.client_id(ODD), ending="/up")
        fleet.run_until(lambda: len(uploads_of(fleet, tap, ODD)) == 2, 30)
        fleet.settle()
        caplog.clear()
        yield fleet, tap


def say(fleet, decline, *, signer=ODD, sender=ODD, topic_of=ODD, purpose=DECLINE.purpose):
    """Publish a decline, as any client of the broker could, and deliver it."""
    head = Sealed("demo", purpose, sender, "aggregator")
    sealed = seal_to_member(
        device_identity(fleet, signer), aggregator_identity(fleet).member.seal_key, head, encode(decline)
    )
    (chunk,) = split(sealed, kind=ChunkKind.DECLINE, round=2)
    fleet.broker.submit("attacker", Message(Topics("demo").up(topic_of), chunk), lambda: None)
    fleet.settle()


def test_words_in_its_name_change_nothing(waiting, caplog):
    """Nor does a refusal that nobody asked for, of a device that has answered already."""
    fleet, tap = waiting
    nonce = announcements(fleet, tap)[-1].nonce
    unasked = Decline("demo", "dev-00", fleet.plan.run_id, nonce, int(DeclineReason.OTHER))
    say(fleet, unasked, signer="dev-00", sender="dev-00", topic_of="dev-00")
    assert fleet.service.status() == "round 2: 2 of 3, waiting for dev-02"
    now, before = announcements(fleet, tap)[-1], announcements(fleet, tap)[0]
    true = Decline("demo", ODD, fleet.plan.run_id, now.nonce, int(DeclineReason.DATA))
    say(fleet, dataclasses.replace(true, nonce=before.nonce))
    assert reasons(caplog) == []  # of a round that is over: true then, and of no use now
    say(fleet, true, signer="dev-00")
    say(fleet, true, signer="dev-00", sender="dev-00")
    say(fleet, dataclasses.replace(true, device="dev-00"), topic_of="dev-00", signer=ODD)
    say(fleet, dataclasses.replace(true, run_id=bytes(16)))
    say(fleet, true, purpose="upload")
    assert len(reasons(caplog)) == 5
    assert fleet.service.status() == "round 2: 2 of 3, waiting for dev-02"
    say(fleet, dataclasses.replace(true, fleet="reef"))  # this one the device has signed itself
    assert fleet.records()[-1]["declined"] == {ODD: "upload"}


def test_mended_data_are_taken_up(tmp_path, tap):
    """The run is fetched again every few seconds, and declined once; the earlier reason is not reported again."""
    with fleet_of(tmp_path, unfit, tap=tap, rounds=4) as fleet:
        slow = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.run_until(lambda: fleet.now_s > DEADLINE_S / 2, DEADLINE_S)
        assert len(tap.sent(client=fleet.client_id(ODD), ending="/up")) == 1
        fleet._data[ODD] = grouped_data(4)[ODD]
        fleet.run_until(lambda: uploads_of(fleet, tap, ODD), 20)
        restart_aggregator(fleet)
        fleet.settle()
        tap.forgive(slow)
        records = fleet.run(DEADLINE_S)
        assert [r["declined"] for r in records] == [{}] * 5
        assert [r["contributed"] for r in records] == [4] * 5


def test_replay_makes_nobody_decline(tmp_path, tap):
    """An older announcement, also of the round that is open: as many as a broker likes."""
    with make_fleet(tmp_path / "fleet", grouped_data(3), faults=tap, rounds=2) as fleet:
        late = tap.lose(client=fleet.client_id(ODD), ending="/up")
        fleet.run_until(lambda: fleet.service is not None and len(fleet.service.state.received) == 2, 20)
        before = tap.sent(ending="/s/round")
        fleet.stage.fleet.renew()
        fleet.publish()
        restart_aggregator(fleet)
        fleet.settle()
        assert announcements(fleet, tap)[-1].roster_sequence > announcements(fleet, tap)[0].roster_sequence
        for passage in 10 * before:
            fleet.broker.submit("attacker", Message(passage.topic, passage.payload), lambda: None)
            fleet.settle()
        assert [declines_of(fleet, tap, name) for name in fleet.devices] == [[], [], []]
        tap.forgive(late)
        assert [r["contributed"] for r in fleet.run(DEADLINE_S)] == [3, 3, 3]


def test_newcomer_with_unfit_data_says_so(tmp_path, tap):
    """It begins with a checkpoint; data that are mended are taken up there as well."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=8, quorum=0.6, deadline_s=DEADLINE_S, faults=tap) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        fleet.stage.fleet.revoke("dev-03")
        fleet.publish()
        good = grouped_data(5)["dev-04"]
        fleet.add_device("dev-04", unfit(good))
        data = int(DeclineReason.DATA)
        fleet.run_until(lambda: data in [d.reason for d in declines_of(fleet, tap, "dev-04")], DEADLINE_S / 2)
        slow = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet._data["dev-04"] = good
        fleet.run_until(lambda: fleet.devices["dev-04"].runtime.following is not None, DEADLINE_S)
        tap.forgive(slow)
        records = fleet.run(5 * DEADLINE_S)
        assert records[-1]["missing"] == []
        assert "dev-04" in records[-1]["clusters"]


def test_refused_uploaders_are_not_awaited(tmp_path):
    """Nobody waits for a device whose upload was refused."""
    data = grouped_data(4)
    data[ODD] = Dataset(data[ODD].x * 40, data[ODD].y)
    with make_fleet(tmp_path / "fleet", data, quorum=0.5, deadline_s=DEADLINE_S, norm_limit=5.0) as fleet:
        records = fleet.run(DEADLINE_S)
        assert fleet.now_s < DEADLINE_S / 2
        assert [r["declined"] for r in records] == [{ODD: "upload"}] * 3 + [{}]


def test_common_fault_uses_up_no_run(tmp_path):
    """A few are drawn each round, and no sample fits: at most one round is used up per deadline."""
    data = {name: unfit(batch) for name, batch in grouped_data(6).items()}
    with make_fleet(tmp_path / "fleet", data, rounds=20, quorum=0.5, participation=0.3, deadline_s=DEADLINE_S) as fleet:
        fleet.run_until(lambda: fleet.now_s > 4 * DEADLINE_S, 5 * DEADLINE_S)
        assert len(fleet.records()) <= 4
