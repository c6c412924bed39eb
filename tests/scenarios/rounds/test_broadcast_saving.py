"""IFCA's saving of communication on whole fleets: model bytes that devices fetch once their identities are stable."""

from shoal_lab.loopback.transport import Hop

from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.messages import NO_ASSIGNMENT
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    Wiretap,
    announcements,
    grouped_data,
    make_exact_fleet,
    same_partition,
    thetas,
    truth_of,
)
from tests.helpers.tasks import logistic_bundle

INPUTS = 40
BUNDLE = logistic_bundle(INPUTS, 4)
OPTIONS = {"algorithm": "ifca", "rounds": 20, "quorum": 1.0, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
SETTINGS = {"k": "2", "restarts": "4", "restart_rounds": "2"}
SAVING = {**SETTINGS, "stable_rounds": "2", "probe_every": "8"}


def play(root, settings, **options):
    """Return (records, models, (client, kind) of each vector that a device received by round, announcements) of a run."""
    tap = Wiretap()
    data = grouped_data(6, 2, n=200, inputs=INPUTS)
    with make_exact_fleet(
        root, data, bundle=BUNDLE, faults=tap, **{**OPTIONS, **options, "settings": settings}
    ) as fleet:
        received = []
        while not fleet.finished:
            before = len(tap.heard)
            done = len(fleet.records())
            fleet.run_until(lambda done=done: fleet.closed() > done, 30)
            down = [p for p in tap.heard[before:] if p.hop is Hop.DOWN and p.payload and "/s/model/" in p.topic]
            heads = [(p.client, parse(p.payload)[0]) for p in down]
            received.append([(client, head.kind) for client, head in heads if head.index == 0])
        fleet.settle()
        return fleet.records(), thetas(fleet), received, announcements(fleet, tap)


def narrow_rounds(announced):
    """Return the rounds in which a device was sent one model only."""
    return [a.round for a in announced if any(len(assignment.candidates) == 1 for assignment in a.assignments)]


def test_devices_fetch_their_own_model_only(tmp_path):
    """Restarts end with round 8; 9 and 10 prove stability; 11 to 17 are narrow, 18 is the probe, 19 and 20 narrow again.

    A mean is received in the round that it is made in. Before the probe, and before the final round, a device takes a
    checkpoint of the other model and the means of the last rounds. Choosing among all would have chosen the same.
    """
    _, full_models, full, _ = play(tmp_path / "full", SETTINGS)
    records, models, saving, announced = play(tmp_path / "saving", SAVING)
    assert narrow_rounds(announced) == [11, 12, 13, 14, 15, 16, 17, 19, 20]
    for round_ in range(11, 17):
        assert len(saving[round_ - 1]) == 6
        assert len(full[round_ - 1]) == 12
    for received in saving:
        assert sum(kind is ChunkKind.CHECKPOINT for _, kind in received) in (0, 6)
        assert len(received) <= 4 * 6
    assert sum(map(len, saving)) < sum(map(len, full))
    assert same_partition(records[-1]["clusters"], truth_of(6, 2))
    assert models == full_models
    assert [e["kind"] for r in records for e in r["events"]][-1] == "broadcast-narrowed"


def test_device_sitting_out_gets_no_model(tmp_path):
    """With half of the devices drawn a round, the others fetch nothing; they choose again when they are drawn."""
    everybody = play(tmp_path / "all", {"k": "2"}, rounds=10)
    records, _, received, announced = play(tmp_path / "half", {"k": "2"}, rounds=10, participation=0.5)
    assert [r["ordered"] for r in records] == [3] * 10 + [6]
    assert 0 < sum(map(len, received[1:10])) < sum(map(len, everybody[2][1:10]))
    drawn = [{i for i, place in enumerate(a.assignment_of) if place != NO_ASSIGNMENT} for a in announced]
    idle = 0
    for round_ in range(2, 11):
        clients = {client for client, _ in received[round_ - 1]}
        # What is published at a round's close arrives before the next announcement, by which devices unsubscribe.
        for device in set(range(6)) - drawn[round_ - 2] - drawn[round_ - 1] - drawn[round_]:
            assert f"shoal-demo-dev-{device:02d}" not in clients
            idle += 1
    assert idle
