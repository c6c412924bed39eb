"""States and keys on disk: every cut of a write leaves the old step or the new one, and keys that are done are gone."""

import dataclasses
import hashlib
import os
import stat

import pytest

from crypto.mask.schedule import RunChain
from edge_client.models import store as module
from edge_client.models.states import ModelStates
from edge_client.models.store import (
    FOLDER,
    INDEX_FILE,
    StateIndex,
    StateStore,
    Transcript,
    stored_certificate,
)
from shoal.errors import ConfigError, IntegrityError
from shoal.protocol.codec import decode_prefix, encode
from shoal.protocol.states import FORKED_ROUND, StateId
from shoal.util.files import private_directory, write_atomic
from tests.helpers.model_states import FLEET, RUN_ID, chain, origins, recipe, step, take, vector
from tests.helpers.power_cuts import CutAt, cut_at

MEAN = vector(0.5, -0.25, 4)


@pytest.fixture
def directory(tmp_path):
    return private_directory(tmp_path / "device")


def started(directory):
    """Return a store of a run whose origins are held: two models."""
    store = StateStore.begin(directory, chain())
    states = origins(vector(1, 2, 3), vector(7, 8, 9), keys=take(store, 1))
    store.commit(states, applied=0)
    return store


@pytest.fixture
def store(directory):
    return started(directory)


@pytest.fixture
def states(store):
    return store.load()[0]


def close(store, round_):
    """Apply a step that trains model 0 and leaves model 1 as it is."""
    states, errors = store.load()
    assert not errors
    before = states.newest(0).id.round
    made = states.apply(step(round_, recipe(0, round_, (0, before), mean=1.0)), {0: MEAN}, take(store, round_))
    after = made.keep({StateId(0, round_), StateId(1, 0)})
    store.commit(after, applied=round_)
    return after


def stored_index(directory):
    """Return the head of the index."""
    return decode_prefix((directory / FOLDER / INDEX_FILE).read_bytes()[:-32], StateIndex)[0]


def files(directory):
    return sorted(p.name for p in (directory / FOLDER).iterdir())


def contents(directory):
    return b"".join(p.read_bytes() for p in sorted((directory / FOLDER).iterdir()))


def same(a, b):
    return (a.fleet, a.run_id) == (b.fleet, b.run_id) and {
        id_: (s.theta.tobytes(), s.digest, s.digest_key) for id_, s in a.held.items()
    } == {id_: (s.theta.tobytes(), s.digest, s.digest_key) for id_, s in b.held.items()}


def expected_keys(round_, version=1, first_round=1):
    keys = chain(version, first_round=first_round)
    keys.skip_to(round_)
    return keys.take()


# ---------------------------------------------------------------------------------------------------- in order


def test_without_a_run_there_is_no_store(directory):
    """A device that followed no run has no store."""
    assert StateStore.open(directory) is None


def test_all_comes_back_after_a_restart(directory, store):
    """States and keys come back after a restart."""
    after = close(store, 1)
    keys = take(store, 2)
    again = StateStore.open(directory)
    states, errors = again.load()
    assert same(states, after)
    assert not states.newest(0).theta.flags.writeable
    assert errors == ()
    assert (again.run_id, again.key_version) == (RUN_ID, 1)
    found = take(again, 2)
    assert found.content == keys.content == expected_keys(2).content
    assert found.mask == keys.mask
    assert (found.round, found.fleet, found.key_version) == (2, FLEET, 1)
    assert take(again, 3).content == expected_keys(3).content


def test_files_are_private_one_a_state(directory, store):
    """Files are private and only the states held have one."""
    for round_ in (1, 2, 3):
        close(store, round_)
    assert len(files(directory)) == 3
    assert {stat.S_IMODE((directory / FOLDER / name).stat().st_mode) for name in files(directory)} == {0o600}
    assert stat.S_IMODE((directory / FOLDER).stat().st_mode) == 0o700


def test_file_of_a_failed_commit_is_removed(directory, store, states, monkeypatch):
    """The file of a state whose commit failed is removed by the next one."""
    made = states.apply(step(1, recipe(0, 1, (0, 0), mean=1.0)), {0: MEAN}, take(store, 1))
    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_index", lambda *_, **__: (_ for _ in ()).throw(ConfigError("the disk is full")))
        with pytest.raises(ConfigError, match="full"):
            store.commit(made.keep({StateId(0, 1), StateId(1, 0)}), applied=1)
    assert len(files(directory)) == 4
    store.commit(states, applied=0)
    assert len(files(directory)) == 3
    assert same(StateStore.open(directory).load()[0], states)


def test_long_states_rest_in_their_files(directory, store, states, monkeypatch):
    """A resting state takes no memory, and later states are made from it as before, also once its file is removed."""
    assert same(store.at_rest(states, ()), states)
    assert all(state.theta.flags.owndata for state in store.at_rest(states, ()).held.values())
    monkeypatch.setattr(module, "RESTING_FROM_BYTES", 1)
    resting = store.at_rest(states, {StateId(1, 0)})
    assert [state.theta.flags.owndata for state in resting.held.values()] == [False, True]
    assert store.at_rest(resting, {StateId(1, 0)}).held == resting.held
    first = step(1, recipe(0, 1, (0, 0), mean=1.0))
    state_path(directory, states, StateId(0, 0)).unlink()
    assert same(resting.apply(first, {0: MEAN}, take(store, 1)), states.apply(first, {0: MEAN}, take(store, 1)))


def test_new_run_removes_the_last_one(directory):
    """A new run removes states and keys of the last one."""
    close(started(directory), 1)
    old = contents(directory)
    StateStore.begin(directory, chain(run_id=b"s" * 16))
    store = StateStore.open(directory)
    assert store.run_id == b"s" * 16
    assert store.load()[0].held == {}
    assert files(directory) == [INDEX_FILE]
    # No secret is half zeros, as the end of an index without certificate is.
    parts = {part for i in range(len(old) - 32) if (part := old[i : i + 32]).count(0) < 16}
    assert not any(part in contents(directory) for part in parts)


def test_transcript_outlives_a_restart(directory, store, states):
    """The transcript comes back after a restart and a refused run stays refused."""
    store.commit(states, applied=0, transcript=Transcript(3, b"h" * 32))
    store.commit(states, applied=0)
    assert StateStore.open(directory).transcript == Transcript(3, b"h" * 32)
    take(store, 4)
    store.refuse_run()
    again = StateStore.open(directory)
    assert again.transcript.round == FORKED_ROUND
    assert again.pending.keys() == store.pending.keys()
    assert StateStore.begin(directory, chain(run_id=b"s" * 16)).transcript == Transcript()


# ---------------------------------------------------------------------------------------------------- keys


def test_chain_is_durable_before_its_keys(directory, store):
    """The step of the chain is on the disk before keys are returned; the sync of the upload makes the file's name durable."""
    with pytest.MonkeyPatch.context() as patch:
        log = CutAt(patch, 10**6).log
        take(store, 5)
    kinds = [name for name, *_ in log]
    assert kinds == ["write", "write", "fdatasync", "replace"]
    again = StateStore.open(directory)
    assert again.has_keys(5)
    assert not again.has_keys(4)


def test_peeked_keys_change_nothing(directory, store):
    """Keys that are peeked at are those that are taken and change nothing on the disk."""
    before = contents(directory)
    peeked = store.peek(4)
    assert contents(directory) == before
    assert store.peek(3).content != peeked.content
    assert take(StateStore.open(directory), 4).content == peeked.content
    with pytest.raises(IntegrityError, match="erased"):
        StateStore.open(directory).peek(3)


def test_keys_are_derived_once(store, states, monkeypatch):
    """Keys are derived once and taken as they were peeked at."""
    derived = []
    real = RunChain.take
    monkeypatch.setattr(RunChain, "take", lambda self: derived.append(self.next_round) or real(self))
    peeked = [store.peek(2) for _ in range(3)]
    store.commit(states, applied=1, taking=(2,))
    assert derived == [2]
    assert {keys.content for keys in (*peeked, store.peek(2))} == {expected_keys(2).content}
    assert store.peek(3).content == expected_keys(3).content, "of the chain after the commit"
    store.renew(chain(2, first_round=3))
    assert store.peek(3).key_version == 2, "none of the older version is left"


def test_commit_takes_the_open_rounds_keys(directory, store, states):
    """A commit takes the keys of the open round in the same write."""
    keys = store.peek(4)
    store.commit(states, applied=3, taking=(4,))
    opened = StateStore.open(directory)
    assert opened.pending.keys() == {4}
    assert opened.peek(4).content == keys.content
    assert not opened.has_keys(3)
    opened.commit(states, applied=3, taking=(4,))
    assert StateStore.open(directory).pending.keys() == {4}, "announced again"


def test_every_second_round_is_stored(directory, store, states):
    """A device goes on without a write only from the round before, and only with the keys of this round."""

    def saw(round_):
        return store.saw(Transcript(round_, bytes([round_]) * 32))

    assert not saw(3), "nothing was stored in round 2"
    store.commit(states, applied=1, taking=range(2, 4), transcript=Transcript(2, b"b" * 32))
    assert StateStore.open(directory).pending.keys() == {2, 3}
    before = contents(directory)
    assert saw(3)
    assert store.transcript.round == 3
    assert contents(directory) == before
    assert not saw(4), "it has no means of three rounds"
    store.commit(states, applied=3, taking=range(4, 6))
    assert StateStore.open(directory).pending.keys() == {4, 5}
    assert not any(expected_keys(r).content in contents(directory) for r in (2, 3)), "keys of applied rounds"
    store.renew(chain(2, first_round=5))
    assert not saw(5), "its keys are those of a newer version"


def test_skipped_rounds_can_not_be_taken(store):
    take(store, 5)
    for round_ in (2, 3, 4):
        assert not store.has_keys(round_)
        with pytest.raises(IntegrityError, match=f"the keys of round {round_} are erased"):
            take(store, round_)
    assert take(store, 6).content == expected_keys(6).content


def test_keys_that_wait_for_checkpoint_stay(directory, store):
    """Keys of rounds that wait for a checkpoint stay."""
    for round_ in (1, 2, 3):
        take(store, round_)
    states, _ = store.load()
    store.commit(states, applied=3, waiting={2})
    assert [store.has_keys(r) for r in (1, 2, 3, 4)] == [False, True, False, True]
    assert take(StateStore.open(directory), 2).content == expected_keys(2).content
    store.commit(states, applied=3)
    assert not StateStore.open(directory).has_keys(2)


def test_keys_of_missed_rounds_are_erased(directory, store):
    """It was away from round 2 on; only round 4 waits for a checkpoint."""
    take(store, 1)
    states, _ = store.load()
    store.commit(states, applied=5, waiting={4})
    for opened in (store, StateStore.open(directory)):
        assert [r for r in range(1, 8) if opened.has_keys(r)] == [4, 6, 7]
        assert take(opened, 4).content == expected_keys(4).content
        assert take(opened, 6).content == expected_keys(6).content


@pytest.mark.parametrize(
    ("taken", "first", "pending", "older", "newer"),
    [
        ([4], 5, [1, 4], [4], [6]),
        ([3, 4, 5], 4, [1, 3], [3], [4, 5]),
        # It was away in rounds 2 to 5.
        ([], 5, [1, 3, 4], [4], [5]),
    ],
    ids=["pending rounds stay", "keys taken ahead go", "late"],
)
def test_newer_version_replaces_the_chain(directory, store, taken, first, pending, older, newer):
    for round_ in taken:
        take(store, round_)
    store.renew(chain(2, first_round=first))
    again = StateStore.open(directory)
    assert (again.key_version, sorted(again.pending)) == (2, pending)
    assert [take(again, r).content for r in older] == [expected_keys(r).content for r in older]
    assert [take(again, r).content for r in newer] == [expected_keys(r, 2, first).content for r in newer]


def test_announced_steps_keys_stay(directory, store):
    """Its round is long before those that are kept anyway."""
    store.renew(chain(2, first_round=2), 9, [2, 4])
    again = StateStore.open(directory)
    assert sorted(again.pending) == [1, 2, 4, 7, 8]
    assert again.peek(4).content == expected_keys(4).content
    assert again.keys_under(4, 2).key_version == 2


def test_foreign_chain_is_refused(directory, store):
    """A chain that does not continue the run is refused."""
    take(store, 4)
    for wrong in (chain(1, first_round=5), chain(2, run_id=b"x" * 16, first_round=5)):
        with pytest.raises(IntegrityError, match="does not continue version 1"):
            store.renew(wrong)
    assert store.key_version == StateStore.open(directory).key_version == 1


# ---------------------------------------------------------------------------------------------------- damage


def state_path(directory, states, id_):
    return directory / FOLDER / f"state-{states.held[id_].digest.hex()}.bin"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    write_atomic(path, bytes(data))


CHANGES = [
    lambda p: flip(p, 0),
    lambda p: flip(p, 40),
    lambda p: flip(p, -33),
    lambda p: flip(p, -1),
    lambda p: write_atomic(p, p.read_bytes()[:-1]),
    lambda p: write_atomic(p, p.read_bytes()[: p.stat().st_size // 2]),
    lambda p: write_atomic(p, p.read_bytes() + b"\0"),
    lambda p: write_atomic(p, b""),
    lambda p: write_atomic(p, bytes(p.stat().st_size)),
]


@pytest.mark.parametrize("change", [*CHANGES, lambda p: p.unlink()])
def test_damaged_state_awaits_a_checkpoint(directory, change):
    """A damaged state is reported and a checkpoint takes its place."""
    states = close(started(directory), 1)
    change(state_path(directory, states, StateId(0, 1)))
    store = StateStore.open(directory)
    found, errors = store.load()
    assert list(found.held) == [StateId(1, 0)]
    assert len(errors) == 1
    assert "checkpoint" in errors[0].hint
    store.commit(found.with_states([states.held[StateId(0, 1)]]), applied=1)
    healed, errors = StateStore.open(directory).load()
    assert errors == ()
    assert same(healed, states)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (lambda _, other: other, "another state than the index says"),
        (lambda own, _: own + bytes(32), "is damaged: it holds 44 bytes where 3 coordinates belong"),
    ],
    ids=["another state's file", "surplus bytes"],
)
def test_foreign_bytes_are_found(directory, foreign, words):
    states = close(started(directory), 1)
    path, other = (state_path(directory, states, id_) for id_ in (StateId(0, 1), StateId(1, 0)))
    write_atomic(path, foreign(path.read_bytes(), other.read_bytes()))
    _, (error,) = StateStore.open(directory).load()
    assert words in str(error)


def test_any_changed_byte_is_found(directory):
    """The file has no checksum: the digest that the device signs is one."""
    states = close(started(directory), 1)
    path = state_path(directory, states, StateId(0, 1))
    size = path.stat().st_size
    for at in range(size - 4 * len(MEAN), size):
        flip(path, at)
        _, errors = StateStore.open(directory).load()
        assert [str(error) for error in errors] == [f"{path} is damaged"]
        flip(path, at)
    assert StateStore.open(directory).load()[1] == ()


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_index_has_a_way_out(directory, change):
    """A damaged index is refused with a way out."""
    close(started(directory), 1)
    change(directory / FOLDER / INDEX_FILE)
    before = files(directory)
    with pytest.raises(IntegrityError, match="damaged") as caught:
        StateStore.open(directory)
    assert "shoal-fleet rotate" in caught.value.hint
    assert files(directory) == before
    StateStore.begin(directory, chain(2))
    assert StateStore.open(directory).key_version == 2


def test_index_of_another_version_is_refused(directory):
    started(directory)
    path = directory / FOLDER / INDEX_FILE
    newer = encode(dataclasses.replace(stored_index(directory), version=3))
    write_atomic(path, newer, hashlib.sha256(newer).digest())
    with pytest.raises(IntegrityError, match="version 3, not 2"):
        StateStore.open(directory)


def test_readable_index_is_refused(directory):
    """An index that others can read is refused."""
    started(directory)
    (directory / FOLDER / INDEX_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        StateStore.open(directory)


def test_secrets_are_not_printed(directory, store):
    keys = take(store, 2)
    index = stored_index(directory)
    for secret in (index.chain, keys.content, keys.mask.reveal()):
        assert repr(secret) not in repr(index)
        assert secret.hex() not in repr(index)


# ---------------------------------------------------------------------------------------------------- power cuts


def each_cut(tmp_path, prepare, change):
    """Yield what was prepared in a started store, its directory, and the store after each cut of a change, the last whole."""
    left, ended = 0, False
    while not ended:
        directory = private_directory(tmp_path / str(left))
        store = started(directory)
        before = prepare(store)
        ended = cut_at(left, change, store, directory)
        left += 1
        yield before, directory, StateStore.open(directory)


def test_cut_at_any_write_of_a_step(tmp_path):
    """The old one with the keys to repeat it, to the same bits; after a restart no file is left over."""
    outcomes = []
    for (before, keys), directory, again in each_cut(
        tmp_path, lambda store: (close(store, 1), take(store, 2)), lambda store, _: close(store, 2)
    ):
        states, errors = again.load()
        assert errors == ()
        done = StateId(0, 2) in states.held
        outcomes.append(done)
        assert len(files(directory)) == 1 + len(states.held)
        assert keys.content in contents(directory) or done
        if done:
            assert not again.has_keys(2)
            assert keys.content not in contents(directory)
        else:
            assert same(states, before)
            assert take(again, 2).content == keys.content
            close(again, 2)
        assert again.load()[0].newest(0).theta.tolist() == (vector(1, 2, 3) + MEAN + MEAN).tolist()
        assert take(again, 3).content == expected_keys(3).content
    assert set(outcomes) == {False, True}
    assert len(outcomes) == 10, "two of them are synchronisations"


def test_cut_while_keys_are_taken(tmp_path):
    """A cut while keys are taken never gives a round two keys or loses it."""
    cuts = 0
    for _, _, again in each_cut(tmp_path, lambda _: None, lambda store, _: take(store, 4)):
        assert take(again, 4).content == expected_keys(4).content
        assert take(again, 5).content == expected_keys(5).content
        assert not again.has_keys(3)
        cuts += 1
    assert cuts > 4


def test_cut_at_the_start_of_a_run(tmp_path):
    """A cut at the start of a run leaves the old run or the new one."""
    runs = set()

    def begin(_store, directory):
        StateStore.begin(directory, chain(run_id=b"s" * 16))

    for old, directory, again in each_cut(tmp_path, lambda store: close(store, 1), begin):
        runs.add(again.run_id)
        states, errors = again.load()
        assert errors == ()
        assert same(states, old) if again.run_id == RUN_ID else not states.held
        assert len(files(directory)) == 1 + len(states.held)
    assert runs == {RUN_ID, b"s" * 16}


def test_cut_in_first_start_or_renewal(tmp_path):
    """A cut in the first start or a renewal leaves all or nothing."""
    cuts, ended = 0, False
    while not ended:
        first, renewed = (private_directory(tmp_path / f"{name}{cuts}") for name in "ab")
        store = started(renewed)
        ended = cut_at(cuts, StateStore.begin, first, chain())
        ended = cut_at(cuts, store.renew, chain(2, first_round=2)) and ended
        found = StateStore.open(first)
        assert found is None or take(found, 1).content == expected_keys(1).content
        again = StateStore.open(renewed)
        assert take(again, 1).content == expected_keys(1).content
        assert take(again, 2).key_version == again.key_version
        cuts += 1
    assert again.key_version == 2


def test_states_are_written_before_the_index(store):
    """New states are on the disk before the index names them and old ones go afterwards."""
    close(store, 1)
    take(store, 2)
    with pytest.MonkeyPatch.context() as patch:
        log = CutAt(patch, 10**6).log
        close(store, 2)
    kinds = ["index" if name == "replace" and entry[1].endswith(INDEX_FILE) else name for name, *entry in log]
    at = kinds.index("index")
    assert kinds[:at].count("replace") == 1
    assert kinds[: kinds.index("replace")].count("fdatasync") == 1
    assert "fsync" not in kinds  # the sync of the upload makes both names durable
    assert kinds[:at].count("fdatasync") == 2
    assert "unlink" not in kinds[:at]
    assert kinds.count("unlink") == 1


def test_index_without_certificate_is_read(directory):
    """As an earlier version of Shoal wrote it."""
    keys = take(started(directory), 2)
    path = directory / FOLDER / INDEX_FILE
    earlier = encode(dataclasses.replace(stored_index(directory), version=1))
    write_atomic(path, earlier, hashlib.sha256(earlier).digest())
    assert take(StateStore.open(directory), 2).content == keys.content
    assert stored_certificate(directory / FOLDER).statements == ()


def test_full_disk_leaves_all_as_it_was(store, monkeypatch):
    """A full disk leaves keys and states as they were."""
    before = close(store, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ConfigError, match="No space left"):
            take(store, 2)
        assert not store.pending
        with pytest.raises(ConfigError, match="No space left"):
            store.commit(ModelStates(FLEET, RUN_ID, {}), applied=1)
    assert same(store.load()[0], before)
    assert take(store, 2).content == expected_keys(2).content
