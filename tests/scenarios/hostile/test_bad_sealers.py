"""Devices that seal something else than the final model, or nothing: the owner has the model, and learns who they are."""

import dataclasses

import numpy as np
import pytest

from edge_client.models import round_context
from edge_client.models.checkpoints import seal_checkpoint
from edge_client.models.states import ModelState
from shoal.errors import UntrustedError
from shoal.protocol.shards import mean_part_number
from shoal.protocol.states import SPARE_CHECKPOINTS, checkpoint_number, mean_number, spare_number
from tests.helpers.cases import with_long
from tests.helpers.fleets import grouped_data, make_fleet, names
from tests.helpers.owner_models import reader_of

KINDS = ("zeros", "garbage", "nothing")


@pytest.fixture
def sealing_badly(monkeypatch):
    """Return device -> how it seals: as zeros, as garbage, or not at all."""
    bad = {}

    def seal(identity, keys, state, task=b""):
        how = bad.get(identity.name)
        if how == "zeros":
            zeros = np.zeros_like(state.theta)
            state = ModelState.of(state.id, zeros, run_id=keys.run_id, digest_key=state.digest_key)
        sealed = seal_checkpoint(identity, keys, state, task)
        if how == "garbage":
            payload = bytes(sealed.payload)
            return dataclasses.replace(sealed, payload=payload[:200] + bytes(len(payload) - 200))
        return sealed

    attachment = round_context.RoundContext.attachment

    def attach(context, identity):
        return [] if bad.get(identity.name) == "nothing" else attachment(context, identity)

    monkeypatch.setattr(round_context, "seal_checkpoint", seal)
    monkeypatch.setattr(round_context.RoundContext, "attachment", attach)
    return bad


def sealers(fleet):
    """Return the devices that the final round asked to seal, in the order of their names."""
    last = reader_of(fleet).last
    return [fleet.stage.fleet.roster.devices[i].name for i in last._asked(0)]


@pytest.mark.parametrize(
    ("count", "kind", "many"),
    [(5, "zeros", 2), *with_long([(5, "garbage", 1), (5, "nothing", 2)])]
    + [
        pytest.param(n, k, m, marks=pytest.mark.long)
        for n in (3, 7, 12)
        for k in KINDS
        for m in (1, 2)
        if (n, k, m) != (3, "garbage", 2)  # their uploads are refused, and one device is fewer than min_contributors
    ],
)
def test_owner_has_the_model_despite_liars(tmp_path, sealing_badly, count, kind, many):
    """The owner has the final model although some of its sealers lie."""
    with make_fleet(tmp_path / "first", count=count, rounds=2, min_contributors=2, mode="rotation") as fleet:
        fleet.run(60)
        asked = sealers(fleet)
        assert len(asked) == 3
        assert reader_of(fleet).doubts() == []
    for liars in (asked[:many], asked[-many:]):
        sealing_badly.clear()
        sealing_badly.update(dict.fromkeys(liars, kind))
        with make_fleet(
            tmp_path / liars[0] / str(many), count=count, rounds=2, min_contributors=2, mode="rotation"
        ) as fleet:
            fleet.run(600)  # a refused upload of one of three may cost a round its deadline
            reader = reader_of(fleet)
            (model,) = reader.finished_run().models
            assert model.theta.tobytes() == fleet.model("dev-00").theta.tobytes()
            told = " ".join(reader.doubts())
            assert {name for name in names(count) if name in told} == set(liars)


def let_one_in(root, sealing_badly, count, bad, back):
    """Let a newcomer join, or a device come ``back``, while devices seal zeros; return in how many rounds it got no model."""
    sealing_badly.update(dict.fromkeys(bad, "zeros"))
    last = names(count + 1)[-1]
    name = last if back else "dev-99"
    with make_fleet(root, count=count + back, rounds=30, min_contributors=2, mode="rotation", quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 1000)
        if back:
            fleet.kill_device(name)
            fleet.run_until(lambda: fleet.closed() >= 7, 1000)
            fleet.revive_device(name)
        else:
            fleet.add_device(name, grouped_data(count + 1)[last])
        before, records = fleet.closed(), fleet.run(3000)
        honest = next(n for n in names(count) if n not in bad)
        assert any(name in r["norms"] for r in records if r["round"] > before)
        assert fleet.model(name).theta.tobytes() == fleet.model(honest).theta.tobytes()
        lost = sum(r["declined"].get(name) == "state" for r in records)
        told = reader_of(fleet).histories()
        assert bool(told) == bool(lost)
        assert {line.split()[0] for line in told} <= set(bad)
        assert all(line.endswith(f"has signed another history or state than {name} was shown") for line in told)
    return lost


def test_newcomer_names_false_sealers(tmp_path, sealing_badly):
    """A newcomer gets the model although devices seal it falsely and names them."""
    assert let_one_in(tmp_path, sealing_badly, 4, ("dev-01", "dev-03"), back=False)


@pytest.mark.long
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("count", "liars"), [(2, 1), (3, 2), (7, 5)])
def test_false_sealers_keep_no_device_out(tmp_path, sealing_badly, count, liars, back):
    """A device without the model gets it whichever devices seal it falsely."""
    lost = 0
    for i, bad in enumerate((names(count)[:liars], names(count)[-liars:])):
        sealing_badly.clear()
        lost += let_one_in(tmp_path / str(i), sealing_badly, count, bad, back)
    assert lost, "no liar was asked: the test shows nothing"


def test_if_all_sealers_lie_error_names_them(tmp_path, sealing_badly):
    sealing_badly.update(dict.fromkeys(names(3), "zeros"))
    with make_fleet(tmp_path, count=3, rounds=2, min_contributors=2, mode="rotation") as fleet:
        fleet.run(60)
        with pytest.raises(UntrustedError) as caught:
            reader_of(fleet).finished_run()
        assert all(name in str(caught.value) for name in names(3))


def test_no_two_labels_have_one_number():
    models = [*range(4097)]
    spare = {spare_number(m, turn) for m in models for turn in range(SPARE_CHECKPOINTS)}
    means = {mean_number(m, r) for m in models for r in (0, 1)}
    parts = {mean_part_number(mean, worker) for mean in means for worker in range(4)}
    others = means | parts | {checkpoint_number(m) for m in models}
    assert len(spare) == SPARE_CHECKPOINTS * len(models)
    assert not spare & others
    assert max(spare) < 1 << 16
