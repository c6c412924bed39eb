"""Devices that lie from the first round to the last: by turns, with old statements, huge messages, or as another device."""

import dataclasses
import itertools

import pytest

from crypto.seal.envelope import seal_to_group
from edge_client.protocol import presence as presences
from shoal.protocol.channels import PRESENCE
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Presence
from shoal.protocol.states import FORKED_ROUND, TranscriptHead
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from tests.helpers.fleets import (
    device_identity,
    group_key,
    grouped_data,
    make_fleet,
    names,
    restart_device,
    same_partition,
    truth_of,
)
from tests.helpers.owner_models import reader_of
from tests.scenarios.hostile.lying_devices import Lie, Scene, lies_of

MIB = 1 << 20
SECONDS = 3000
ROUNDS = 8
SIZES = [(5, 2), *(pytest.param(n, at, marks=pytest.mark.long) for n in (3, 7, 12) for at in (0, n - 1))]


def lie_of(row, name):
    return next(lie for lie in lies_of(row) if lie.name == name)


def always(row, value):
    return Lie(row, "always", lambda *_: value)


BY_TURNS = (
    lie_of("update vector", "huge"),
    lie_of("Statement.transcript", "ones"),
    lie_of("Upload.samples", "largest"),
    lie_of("Upload.loss", "NaN"),
    lie_of("HeldState.digest", "one bit"),
    lie_of("Sealed.sender", "another device's"),
    lie_of("Upload.key_id", "one bit"),
    lie_of("update vector", "NaN"),
    lie_of("Upload.statement", "cut"),
)
HUGE = {
    "statement": always("Upload.statement", bytes(MIB - 4096)),
    "statement beyond the limit": always("Upload.statement", bytes(4 * MIB)),
    "margins": always("Upload.margins", (0.5,) * 100_000),
    "parts": always("Upload.parts", (b"\1" * 32,) * 30_000),
}


def persist(scene, lies):
    """Tell the next lie in each round to the end; return the records and the rounds in which the liar was told of."""
    fleet, named = scene.fleet, []
    for lie in itertools.cycle(lies):
        at = scene.open_round
        scene.liar.lie = lie
        fleet.run_until(lambda at=at: scene.open_round > at or fleet.finished, SECONDS)
        found = scene.accused(at)
        assert set(found) <= {scene.liar.name}, (at, lie.row, found)
        named += [at] * bool(found)
        if fleet.finished:
            break
    fleet.settle()
    records = fleet.records()
    assert {name for record in records for name in record["missing"]} <= {scene.liar.name}
    assert len({fleet.model(name).theta.tobytes() for name in scene.honest}) == 1
    assert records[-2]["loss"] < records[0]["loss"], "the models have learned"
    assert reader_of(fleet).finished_run().models
    return records, named


@pytest.mark.parametrize(("count", "place"), SIZES)
def test_new_lie_each_round_costs_liar_alone(tmp_path, count, place):
    """A device that tells another lie in each round costs itself alone."""
    with Scene(tmp_path / "fleet", place, [], count=count, rounds=len(BY_TURNS) + 1) as scene:
        _, named = persist(scene, BY_TURNS)
        assert len(scene.liar.told) >= len(BY_TURNS)
        assert len(named) >= len(BY_TURNS) - 1


@pytest.mark.parametrize(("count", "place"), [pytest.param(*s.values, marks=pytest.mark.long) for s in SIZES[1:]])
@pytest.mark.parametrize("row", ["Upload.statement", "Statement.round", "Statement.transcript", "HeldState.digest"])
def test_stale_answers_are_named_each_round(tmp_path, count, place, row):
    """A device that says what it said a round ago is named in each round."""
    with Scene(tmp_path / "fleet", place, [], count=count, rounds=ROUNDS) as scene:
        records, named = persist(scene, [lie_of(row, "repeated from before")])
        # The program of a device whose digest is false goes on from a checkpoint, and names other states then.
        assert len(named) >= (1 if row == "HeldState.digest" else ROUNDS // 2)
        if row != "HeldState.digest":
            assert sum(scene.liar.name in record["norms"] for record in records) <= 2, "the first round has no past"


@pytest.mark.parametrize(
    ("kind", "count"),
    [("statement", 5), *(pytest.param(k, n, marks=pytest.mark.long) for k in HUGE for n in (3, 7))],
)
def test_huge_heads_hold_nobody_up(tmp_path, kind, count):
    """A device whose uploads have huge heads holds nobody up."""
    with Scene(tmp_path / "fleet", count // 2, [], count=count, rounds=ROUNDS) as scene:
        records, named = persist(scene, [HUGE[kind]])
        assert scene.liar.told
        assert named or scene.liar.name in records[0]["missing"]
        assert not any(scene.liar.name in record["norms"] for record in records)


CLUSTERED = {
    "ifca": {"algorithm": "ifca", "settings": {"k": "2"}, "rounds": 25},
    "ifca, starts": {"algorithm": "ifca", "settings": {"k": "2", "restarts": "3", "restart_rounds": "2"}, "rounds": 25},
    "ifca, auto": {"algorithm": "ifca", "settings": {"k": "auto"}, "rounds": 25},
    "fesem": {"algorithm": "fesem", "settings": {"k": "2"}, "rounds": 12},
    "cfl": {"algorithm": "cfl", "rounds": 25},
}
LOSSES = ("NaN", "infinite", "largest float32", "zero", "huge and negative")
FIGURES = [
    *((options, "Upload.loss", lie) for options in ("ifca", "ifca, starts", "ifca, auto") for lie in LOSSES),
    *(("fesem", "Upload.nearest", lie) for lie in ("one", "another device's")),
    *(("cfl", "Upload.margins", lie) for lie in ("at the limit", "positive limit", "NaN")),
]


@pytest.mark.long
@pytest.mark.parametrize(("options", "row", "lie"), FIGURES)
@pytest.mark.parametrize("place", [0, 11])
def test_false_figures_move_no_clusters(tmp_path, options, row, lie, place):
    """Two true groups of six. Within the liar's own five others are left; CFL may part them further."""
    data, truth = grouped_data(12, groups=2), truth_of(12, 2)
    with Scene(tmp_path / "fleet", place, [lie_of(row, lie)], data=data, count=12, **CLUSTERED[options]) as scene:
        (told,) = scene.live(SECONDS)
        assert set(told.named) <= {scene.liar.name}
        assert told.named or lie not in ("NaN", "infinite", "huge and negative")
        found = scene.fleet.records()[-1]["clusters"]
        whole = [n for n in scene.honest if options != "cfl" or truth[n] != truth[scene.liar.name]]
        assert same_partition({n: found[n] for n in whole}, {n: truth[n] for n in whole})
        assert all(found[a] != found[b] for a in scene.honest for b in scene.honest if truth[a] != truth[b])


def false_presence(fleet, liar, name, **fields):
    """Publish a presence of ``name`` on its topic, as ``liar`` can sign it."""
    plan = fleet.plan
    message = encode(Presence(plan.fleet, name, **{"online": True, "version": "", **fields}))
    sealed = seal_to_group(device_identity(fleet, liar), group_key(fleet), PRESENCE.head(plan.fleet, name), message)
    (chunk,) = split(sealed, kind=PRESENCE.kind, round=0)
    fleet.broker.submit(
        fleet.client_id(liar), Message(Topics(plan.fleet).state(name), chunk, retained=True), lambda: None
    )
    fleet.settle()


@pytest.mark.parametrize("of_another", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("online", [False, pytest.param(True, marks=pytest.mark.long)])
def test_borrowed_birth_sends_nobody_away(tmp_path, of_another, online):
    """On the other's topic, where a broker's rules forbid it, and on its own; with a later birth, and as a rival."""
    liar, victim = "dev-02", "dev-01"
    with make_fleet(tmp_path, count=5, rounds=6, min_contributors=3) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, SECONDS)
        births = fleet.service._presences._births
        key = fleet.stage.fleet.roster.device(victim).sign_key
        birth = births[key]
        for later in (0, 1, (1 << 64) - 1 - birth):
            told = {"birth": birth + later, "online": online, "rival": birth}
            false_presence(fleet, liar, victim if of_another else liar, **told)
            assert births[key] == birth
            at = fleet.closed()
            fleet.run_until(lambda at=at: fleet.closed() > at or fleet.finished, SECONDS)
        records = fleet.run(SECONDS)
        assert not {name for record in records for name in record["missing"]} - {liar}
        assert all(victim in record["norms"] for record in records[:-1])
        assert all(not facts.refused for name, facts in fleet.service.watch.devices.devices.items() if name != liar)
        assert len({fleet.model(name).theta.tobytes() for name in names(5) if name != liar}) == 1


@pytest.mark.long
@pytest.mark.parametrize("round_", [0, 1, 5, 1 << 20, FORKED_ROUND])
@pytest.mark.parametrize("liars", [("dev-00", "dev-05"), ("dev-10", "dev-11")])
def test_two_false_heads_of_12_end_nothing(tmp_path, monkeypatch, caplog, liars, round_):
    """Two of twelve that state one false head in their presences end nothing."""
    honest = presences.seal_to_group
    with make_fleet(tmp_path, count=12, rounds=12, min_contributors=3) as fleet:
        head = TranscriptHead(fleet.plan.run_id, round_, b"f" * 32)

        def seal(identity, group, envelope, plain):
            if identity.name in liars:
                told = decode(plain, Presence)
                plain = encode(dataclasses.replace(told, head=head))
            return honest(identity, group, envelope, plain)

        monkeypatch.setattr(presences, "seal_to_group", seal)
        fleet.run_until(lambda: fleet.closed() >= 5, SECONDS)
        for name in liars:
            restart_device(fleet, name)
        records = fleet.run(SECONDS)
        assert "odd one" not in caplog.text
        assert all(set(record["norms"]) >= set(names(12)) - set(liars) for record in records[:-1])
        assert not {name for record in records for name in (*record["declined"], *record["missing"])} - set(liars)
        assert len({fleet.model(name).theta.tobytes() for name in names(12) if name not in liars}) == 1
        told = " ".join(reader_of(fleet).histories())
        if round_ in (1 << 20, FORKED_ROUND):
            words = "has left run 1" if round_ == FORKED_ROUND else "states the history of round 1048576"
            assert all(f"{name} {words}" in told for name in liars)
        assert not any(
            f"{name} {word}" in told for name in names(12) if name not in liars for word in ("has", "states")
        )
