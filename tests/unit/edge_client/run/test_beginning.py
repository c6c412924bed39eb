"""The start of a run: its package, the order of its files, and a late start with a checkpoint."""

import dataclasses
import shutil
import types

import numpy as np
import pytest

from crypto.seal.envelope import SealError
from crypto.seal.identity import sign_document
from crypto.seal.replay import ReplayWatermark
from edge_client import membership as devices
from edge_client.membership import DeviceMembership
from edge_client.models.checkpoints import BadCheckpointError
from edge_client.models.store import StateStore
from edge_client.run.beginning import LateStart, RunFollower, keep_run, open_run, resume_run, stored_run
from edge_client.storage.state import DeviceState
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.recipe import Recipe
from shoal.protocol.states import StateId
from tests.helpers.earlier_formats import earlier_plan
from tests.helpers.power_cuts import cut_at
from tests.helpers.round_runs import LENGTH, Scene, origins, statements
from tests.helpers.tasks import logistic_bundle

ORIGIN = StateId(0, 0)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path, "dev-1", "dev-2")


@pytest.fixture
def member(scene):
    return scene.parties.members["dev-1"]


def again(member):
    """Return the membership of a device that was restarted."""
    return DeviceMembership(member.directory)


def keep(scene, member):
    begun = open_run(scene.package, member)
    return keep_run(begun, scene.package, member, DeviceState(member.directory))


def test_two_devices_begin_alike(scene):
    """Two devices begin with the same origins and digests."""
    begun = [open_run(scene.package, member) for member in scene.parties.members.values()]
    held = [run.states.held[ORIGIN] for run in begun]
    assert held[0].digest == held[1].digest
    assert held[0].theta.tobytes() == origins()[0].tobytes()
    assert begun[0].run.bundle.digest == scene.plan.task_digest
    assert begun[0].chain.next_round == 1, "round 0 sealed the package"


def test_package_is_not_owners_is_refused(scene, member):
    """A package that is not the owners is refused."""
    parts = decode(scene.package, RunPackage)
    forged = dataclasses.replace(parts, plan=sign_document(member.identity, scene.plan))
    with pytest.raises(UntrustedError):
        open_run(encode(forged), member)
    for part in ("task", "origins"):
        data = bytearray(getattr(parts, part))
        data[-1] ^= 1
        with pytest.raises(SealError):
            open_run(encode(dataclasses.replace(parts, **{part: bytes(data)})), member)
    with pytest.raises(UntrustedError, match="that is not this run's"):
        open_run(encode(dataclasses.replace(parts, task=parts.origins)), member)


def test_restarted_run_keeps_package_shut(scene, member):
    """A run continues after a restart and its package can't be opened again."""
    keep(scene, member)
    files = DeviceState(member.directory)
    run, models = resume_run(files.load_run(), again(member), ReplayWatermark())
    assert run.plan == scene.plan
    assert run.bundle.digest == scene.plan.task_digest
    assert models.states.held[ORIGIN].theta.tobytes() == origins()[0].tobytes()
    assert stored_run(files.load_run(), again(member)).bundle.digest == scene.plan.task_digest
    with pytest.raises(IntegrityError, match="can't be derived"):
        open_run(scene.package, again(member))


def test_power_cut_leaves_a_usable_run(scene, member, tmp_path):
    """The version's secret is stepped last, so until then the package can be opened again."""
    pristine = shutil.copytree(member.directory, tmp_path / "pristine")
    done, left = False, 0
    while not done:
        shutil.rmtree(member.directory)
        shutil.copytree(pristine, member.directory)
        done = cut_at(left, keep, scene, again(member))
        left += 1
        restarted = again(member)
        package = DeviceState(member.directory).load_run()
        try:
            assert package is not None
            _, models = resume_run(package, restarted, ReplayWatermark())
        except (AssertionError, IntegrityError):
            models = keep(scene, restarted)
        assert models.states.held[ORIGIN].theta.tobytes() == origins()[0].tobytes()
        # Once the run continues, no secret is left from which its chain could be derived again.
        assert again(member).version_key(scene.plan.key_version).next_run == scene.plan.run + 1
    assert left > 8


def test_other_runs_states_are_not_continued(scene, member, tmp_path):
    """The states of another run are not continued."""
    keep(scene, member)
    package = DeviceState(member.directory).load_run()
    other = Scene(tmp_path / "other", "dev-1")
    StateStore.begin(member.directory, other.chain())
    with pytest.raises(IntegrityError, match="another run"):
        resume_run(package, again(member), ReplayWatermark())


def test_damaged_state_is_forgotten(scene, member, caplog):
    """A damaged state is forgotten with a warning."""
    keep(scene, member)
    (path,) = (member.directory / "models").glob("state-*.bin")
    path.write_bytes(path.read_bytes()[:-1])
    _, models = resume_run(DeviceState(member.directory).load_run(), again(member), ReplayWatermark())
    assert models.states.held == {}
    assert "a model state is lost" in caplog.text


@pytest.mark.parametrize("format_", ["an earlier plan", "another document"])
def test_run_earlier_version_stored_refused(scene, member, caplog, format_):
    """The device keeps its place in the fleet: only the run is lost."""
    keep(scene, member)
    files = DeviceState(member.directory)
    parts = decode(files.load_run(), RunPackage)
    owner = scene.parties.owner
    earlier = format_ == "an earlier plan"
    old = earlier_plan(owner.owner, scene.plan) if earlier else sign_document(owner.owner, owner.roster)
    files.save_run(encode(dataclasses.replace(parts, plan=old)))
    follower = RunFollower(again(member), files)
    assert follower.resumed(ReplayWatermark()) is None
    assert follower.held is None
    (record,) = [r for r in caplog.records if r.message == "the stored run can't be resumed"]
    assert "an earlier version of Shoal" in str(record.kv["reason"])
    assert "next run" in record.kv["hint"]
    with pytest.raises(IntegrityError, match="an earlier version of Shoal"):
        stored_run(files.load_run(), again(member))


# -- a late start --


def newcomer(scene, name="new"):
    """Admit a device, which draws a key version, and give all devices the new keys; return the newcomer's membership."""
    owner, root = scene.parties.owner, scene.parties.root
    grant = owner.add_device(devices.init(root / name, name).read_bytes())
    member = scene.parties.members[name] = devices.join(root / name, grant.read_bytes(), owner.fingerprint)
    for old in scene.parties.members.values():
        old.adopt(owner.roster_bytes)
        old.take_grant(scene.parties.grant(old.name))
    return member


@pytest.fixture
def late(scene):
    """Return a fleet with a newcomer, the announcement with which it begins, and the two devices that certify the state."""
    models = {name: scene.device(name) for name in ("dev-1", "dev-2")}
    member = newcomer(scene)
    number = scene.parties.owner.roster.keys_since
    # In round 5 the fleet takes the newer keys, and dev-1 seals the model that has not moved since the origin.
    for held in models.values():
        scene.serve(held, scene.announcement(5, states={0: (0, 0)}, key_version=number))
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 0), 5)
    signed = statements(scene, models, 5, tuple(models))
    announced = scene.announcement(6, states={0: (0, 0)}, key_version=number, checkpoints=(ref,), statements=signed)
    return types.SimpleNamespace(scene=scene, member=member, announced=announced, ref=ref, models=models)


def begin(late, *, sealed=None, most=1 << 20, announced=None):
    start = LateStart(late.scene.plan, late.scene.package)
    ((label, transfer),) = start.locate(announced or late.announced).items()
    sealed = late.scene.transfers[label, transfer] if sealed is None else sealed
    return start.take(label, transfer, memoryview(sealed), late.member, most)


def test_newcomer_begins_with_a_checkpoint(late):
    """A newcomer can't open the package, begins with a checkpoint and has no keys of earlier rounds."""
    with pytest.raises(NotEnrolledError):
        open_run(late.scene.package, late.member)
    begun = begin(late)
    assert begun.run.bundle.digest == late.scene.plan.task_digest
    assert begun.states.held[ORIGIN].theta.tobytes() == origins()[0].tobytes()
    assert (begun.chain.key_version, begun.chain.next_round) == (late.announced.held.key_version, late.ref.round)
    models = keep_run(begun, late.scene.package, late.member, DeviceState(late.member.directory))
    theta = late.scene.serve(models, late.announced)[0]
    assert theta.tobytes() == origins()[0].tobytes()
    _, resumed = resume_run(DeviceState(late.member.directory).load_run(), again(late.member), ReplayWatermark())
    assert resumed.states.digests() == models.states.digests()


def test_run_signed_before_new_keys_begins(scene):
    """Run 2 waits while run 1 goes on under newer keys, under which a device was admitted."""
    owner, bundle = scene.parties.owner, logistic_bundle(4, 3)
    second = make_plan(owner, bundle, Recipe("fedavg", min_contributors=2))
    package = write_run(owner, second, bundle, origins()).read_bytes()
    first = {name: scene.device(name) for name in ("dev-1", "dev-2")}
    late = newcomer(scene)
    number = owner.roster.keys_since
    for held in first.values():
        scene.serve(held, scene.announcement(2, states={0: (0, 0)}, key_version=number))
    for name in first:
        member = again(scene.parties.members[name])
        begun = open_run(package, member)
        assert begun.states.held[ORIGIN].theta.tobytes() == origins()[0].tobytes()
        keep_run(begun, package, member, DeviceState(member.directory))
        assert again(member).version_key(second.key_version).next_run == second.run + 1
        assert again(member).version_key(number).next_run == second.run, "the run goes on under the newer keys"
    with pytest.raises(NotEnrolledError):
        open_run(package, late)


def test_newcomer_without_checkpoint_waits(late):
    """Without a checkpoint under its keys a newcomer waits."""
    start = LateStart(late.scene.plan, late.scene.package)
    held = late.announced.held
    older = dataclasses.replace(late.ref, key_version=late.scene.plan.key_version)
    for refs in ((), (older,)):
        announced = dataclasses.replace(late.announced, held=dataclasses.replace(held, checkpoints=refs))
        assert start.locate(announced) == {}
        assert start.take("x", bytes(16), memoryview(b""), late.member, 0) is None


def test_newcomer_takes_what_is_signed_only(late):
    """Enough devices have signed the state and the owner the task; a checkpoint above the limit is refused unread."""
    held = dataclasses.replace(late.announced.held, statements=late.announced.held.statements[:1])
    with pytest.raises(BadCheckpointError, match="2 are needed"):
        begin(late, announced=dataclasses.replace(late.announced, held=held))
    other = logistic_bundle(LENGTH, 2).to_bytes()
    ref = late.scene.checkpoint("dev-1", late.models["dev-1"], (0, 0), 5, task=other)
    with pytest.raises(BadCheckpointError, match="not the one that the run plan names") as caught:
        begin(late, sealed=late.scene.transfers[ref.label, ref.transfer])
    assert caught.value.sealed_by == "dev-1"
    with pytest.raises(IntegrityError, match="a checkpoint of"):
        begin(late, most=16)


def test_infinite_origins_are_refused(tmp_path):
    """Origins that are not finite are refused."""
    start = np.full((1, LENGTH), np.nan, np.float32)
    scene = Scene(tmp_path, "dev-1", start=start)
    with pytest.raises(IntegrityError, match="not finite"):
        open_run(scene.package, scene.parties.members["dev-1"])
