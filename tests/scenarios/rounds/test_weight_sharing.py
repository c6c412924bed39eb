"""IFCA with a shared segment on whole fleets: one shared mean and k small ones, from the owner's signature to the models."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.loopback.transport import Hop

from edge_client.learning.data import Dataset
from edge_client.models.recipes import weighted_sum
from edge_client.protocol.round_state import Stage
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import Offer, StateId, mean_number
from tests.helpers.fleets import (
    Wiretap,
    announce,
    announcements,
    group_key,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    names,
    reasons,
    restart_aggregator,
    same_partition,
    thetas,
    truth_of,
    uploads_of,
)
from tests.helpers.tasks import logistic_bundle
from tests.scenarios.round_fleets import (
    clear_means,
    continued,
    held_states,
    moved,
    publish_mean,
    relayed_steps,
    taken_over,
)

INPUTS, CLASSES = 40, 4
SHARED, OWN = INPUTS * CLASSES, CLASSES
BUNDLE = logistic_bundle(INPUTS, CLASSES, segment="shared")
OPTIONS = {"algorithm": "ifca", "rounds": 12, "settings": {"k": "2", "restarts": "3", "restart_rounds": "2"}}


def biased_data(count, groups=2, n=100, seed=4):
    """Return device -> Batch: one concept for all, whose classes each group meets in other proportions."""
    rng = np.random.default_rng(seed)
    concept = rng.standard_normal((INPUTS, CLASSES)) * 0.5
    priors = 4.0 * np.eye(CLASSES)
    data = {}
    for i, name in enumerate(names(count)):
        x = rng.standard_normal((n, INPUTS)).astype(np.float32)
        data[name] = Dataset(x, (x @ concept + priors[i % groups]).argmax(1).astype(np.int64))
    return data


def sharing_fleet(root, count=6, **options):
    return make_exact_fleet(root, biased_data(count), bundle=BUNDLE, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """(records, device -> bytes of its model) of a run without trouble, masked."""
    with sharing_fleet(tmp_path_factory.mktemp("calm") / "fleet", quorum=1.0) as fleet:
        return fleet.run(30), thetas(fleet)


def test_groups_share_their_weights(calm):
    """Permutation mode: every device ends with the same shared coordinates, bit for bit, and its group's own ones."""
    records, models = calm
    assert same_partition(records[-1]["clusters"], truth_of(6, 2))
    assert records[-1]["correct"] / records[-1]["tested"] > 0.8
    assert records[10]["loss"] < records[6]["loss"]
    parts = {d: (m[: 4 * SHARED], m[4 * SHARED :]) for d, m in models.items()}
    assert len({shared for shared, _ in parts.values()}) == 1
    assert same_partition({d: hash(own) for d, (_, own) in parts.items()}, truth_of(6, 2))


def test_masks_change_no_bit(tmp_path, calm):
    with sharing_fleet(tmp_path / "fleet", quorum=1.0, mode="none") as fleet:
        records = fleet.run(30)
        assert records[-1]["clusters"] == calm[0][-1]["clusters"]
        assert thetas(fleet) == calm[1]


def test_aggregator_relays_one_shared_mean(tmp_path):
    """Masked, all of them, inside each segment."""
    with sharing_fleet(tmp_path / "fleet", mode="rotation") as fleet:
        fleet.run_until(lambda: fleet.closed() == fleet.plan.recipe.rounds - 1, 30)
        before = held_states(fleet, "dev-00")
        fleet.run(30)
        kept, model = relayed_steps(fleet)[-1], fleet.model("dev-00")
        assert [len(mean.vector) for mean in kept.means] == [OWN, OWN, SHARED]
        clear = clear_means(fleet, kept, lambda m: "shared" if m == SHARED_MODEL else "cluster")
        shared = next(mean.vector for mean in kept.means if mean.model == SHARED_MODEL)
        assert not np.intersect1d(np.abs(shared), np.abs(clear[SHARED_MODEL])).size
        found = []
        for recipe in kept.step.recipes:
            if recipe.model in (model.cluster, SHARED_MODEL):
                (term,) = recipe.terms
                found.append(weighted_sum([(term.weight, before[term.state]), (1.0, clear[recipe.model])]))
        own, shared = found
        assert np.concatenate([shared, own]).tobytes() == model.theta.tobytes()


def model_bytes(tap, hop):
    """Return the bytes of model transfers over one hop."""
    return sum(len(p.payload) for p in tap.heard if p.hop is hop and "/s/model/" in p.topic)


def test_what_is_shared_travels_once(tmp_path):
    """Three models: six rounds bring 6 x (shared + 3 own) instead of 6 x 3 whole vectors, to the broker and to each device."""
    sent = {}
    for segment in ("cluster", "shared"):
        tap, bundle = Wiretap(), logistic_bundle(400, CLASSES, segment=segment)
        options = {**OPTIONS, "rounds": 6, "settings": {"k": "3"}}
        data = grouped_data(6, 3, inputs=400)
        with make_fleet(tmp_path / segment, data, bundle=bundle, faults=tap, **options) as fleet:
            fleet.run(30)
            moved = sum(len(m) for m in moved_models(fleet, tap))
            sent[segment] = [model_bytes(tap, Hop.UP), model_bytes(tap, Hop.DOWN), moved]
    (whole_up, whole_down, models), (up, down, _) = sent["cluster"], sent["shared"]
    assert models > 6, "models did move"
    assert up < 0.55 * whole_up
    assert down < 0.55 * whole_down


def moved_models(fleet, tap):
    """Return each announcement's means."""
    return [[m for kept in a.held.steps for m in kept.means] for a in announcements(fleet, tap)]


@pytest.mark.parametrize("victim", ["aggregator", "fetching device", "sending device"])
def test_a_power_cut_changes_no_bit(tmp_path, calm, victim, tap):
    """A killed program restores the shared segment and its own from its directory."""
    with sharing_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        if victim == "aggregator":
            for rounds in (3, 8):
                fleet.run_until(lambda rounds=rounds: fleet.closed() == rounds, 30)
                restart_aggregator(fleet, steps=1)
        else:
            ending, hop = ("/up", Hop.UP) if victim == "sending device" else ("", Hop.DOWN)
            fleet.run_until(lambda: fleet.closed() == 7, 30)
            client = fleet.client_id("dev-01")
            label = mean_label(fleet, SHARED_MODEL, 8) if victim == "fetching device" else ""
            hold = tap.lose(client=client, ending=ending or label, hop=hop)
            stage = Stage.SENDING if victim == "sending device" else Stage.FETCHING
            fleet.run_until(lambda: fleet.devices["dev-01"].runtime.session.round.stage is stage, 30)
            fleet.settle()
            fleet.kill_device("dev-01")
            tap.forgive(hold)
            fleet.step()
            fleet.revive_device("dev-01")
        records = fleet.run(100)
        assert records[-1]["clusters"] == calm[0][-1]["clusters"]
        assert thetas(fleet) == calm[1]


def mean_label(fleet, model, round_):
    return group_key(fleet).topic_label(fleet.plan.run_id, mean_number(model, round_))


def test_fedavg_takes_a_shared_segment(tmp_path, tap):
    """The baseline to weight sharing on the same task: one model, which travels whole."""
    with make_fleet(tmp_path / "fleet", biased_data(3), bundle=BUNDLE, faults=tap) as fleet:
        fleet.run(10)
        assert len(set(thetas(fleet).values())) == 1
        assert all(a.held.state_of(SHARED_MODEL) is None for a in announcements(fleet, tap))


@dataclasses.dataclass
class Rogue:
    """A weight-sharing fleet that has served round 1 and whose aggregator is now an attacker."""

    fleet: object
    tap: Wiretap
    first: object

    def part(self, of, inside, values, **header):
        """Publish a mean of round 1 of a model, inside a segment, and return its reference."""
        return publish_mean(self.fleet, values, (of, 1, inside), **header)

    def announce(self, *means, **changes):
        """Announce round 2 after a step in which models moved by ``means``."""
        held = dataclasses.replace(moved(self.first.held, *means), **changes)
        announcement = dataclasses.replace(self.first, round=2, nonce=b"\2" * 16, held=held)
        announce(self.fleet, continued(announcement, self.first.held))

    def sent(self):
        """How many uploads each device has sent since the takeover."""
        self.fleet.settle()
        return [len(uploads_of(self.fleet, self.tap, d)) - 1 for d in self.fleet.stage.devices]


@pytest.fixture
def rogue(tmp_path, caplog, tap):
    options = {"faults": tap, "rounds": 2, "settings": {"k": "2"}, "min_contributors": 2}
    with sharing_fleet(tmp_path / "fleet", 2, **options) as fleet:
        first = taken_over(fleet, tap)
        caplog.clear()
        yield Rogue(fleet, tap, first)


SMALL = np.full(SHARED, 0.01, np.float32)
BAD_PARTS = {
    "too short": (SMALL[1:], {}, "a mean of 159 coordinates in 636 bytes"),
    "as long as a whole model": (np.full(SHARED + OWN, 0.01), {}, "a mean of 164 coordinates"),
    "shorter than it says": (SMALL[1:], {"length": SHARED}, "a mean of 160 coordinates in 636 bytes"),
    "under another key": (SMALL, {"key_id": b"\1" * 16}, "the vector is under mask 0101"),
    "that says it is a cluster's": (SMALL[:OWN], {"segment": "cluster"}, "segment 'cluster'"),
    "that says it is all of it": (np.full(SHARED + OWN, 0.01), {"segment": ""}, "segment ''"),
    "with NaN": (np.full(SHARED, np.nan), {}, "a coordinate is NaN or infinite"),
    "longer than any update may be": (np.full(SHARED, 900.0), {}, "where at most 10 is allowed for one step"),
}


@pytest.mark.parametrize("case", [*BAD_PARTS, "none of these"])
def test_shared_mean_is_as_plan_describes(rogue, caplog, case):
    """A shared mean is added only as the plan describes it."""
    values, header, expected = BAD_PARTS.get(case, (SMALL, {}, ""))
    rogue.announce(rogue.part(SHARED_MODEL, "shared", values, **header))
    if not expected:
        assert rogue.sent() == [1, 1]
        assert not reasons(caplog)
        return
    assert rogue.sent() == [0, 0]
    assert len(reasons(caplog)) == 2
    assert expected in reasons(caplog)[0]


def offers(**at):
    """Return offers of both models and the shared segment, all at origin 0 unless given."""
    states = {0: (0, 0), 1: (1, 0), SHARED_MODEL: (0, 0)} | {int(m[1:]): state for m, state in at.items()}
    return tuple(Offer(model, StateId(*state)) for model, state in sorted(states.items()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"offers": offers(m65535=(2, 0))}, "state 0 of model 2 in round 2"),
        ({"offers": offers(m0=(SHARED_MODEL, 1))}, "model 0 is announced with state 1 of model 65535"),
        ({"offers": offers(m65535=(1, 1))}, "model 65535 is announced with state 1 of model 1"),
    ],
)
def test_shared_part_is_held_to_the_plan(rogue, caplog, changes, expected):
    """An announced shared part is held to the plan."""
    rogue.announce(rogue.part(SHARED_MODEL, "shared", SMALL), **changes)
    assert rogue.sent() == [0, 0]
    assert expected in reasons(caplog)[0]


def test_shared_mean_of_one_is_refused(rogue, caplog):
    """A shared mean of one device is refused."""
    rogue.announce(dataclasses.replace(rogue.part(SHARED_MODEL, "shared", SMALL), contributors=1))
    assert rogue.sent() == [0, 0]
    assert "a mean of 1 devices" in reasons(caplog)[0]


def test_whole_mean_is_no_cluster_part(rogue, caplog):
    """A whole mean does not pass for a cluster part."""
    rogue.announce(rogue.part(0, "", np.full(SHARED + OWN, 0.01)), rogue.part(1, "cluster", SMALL[:OWN]))
    assert rogue.sent() == [0, 0]
    assert "a mean of 164 coordinates in 656 bytes, segment ''" in reasons(caplog)[0]
    assert {d.runtime.session.round.stage for d in rogue.fleet.devices.values()} == {Stage.IDLE}


def test_part_is_unmasked_inside_its_segment(rogue):
    """A device trains from its origin plus the clear mean of each segment, as its result shows."""
    fleet = rogue.fleet
    clear = np.arange(SHARED + OWN, dtype=np.float32) / 1000
    origins = held_states(fleet, "dev-00")
    shared = rogue.part(SHARED_MODEL, "shared", clear[:SHARED], clear=True)
    own = [rogue.part(j, "cluster", clear[SHARED:], clear=True) for j in (0, 1)]
    rogue.announce(shared, *own)
    assert rogue.sent() == [1, 1]
    found = fleet.devices["dev-00"].runtime._results._own
    expected = origins[StateId(found.cluster, 0)] + clear
    expected[:SHARED] = origins[StateId(0, 0)][:SHARED] + clear[:SHARED]
    np.testing.assert_array_equal(found.theta, expected)
