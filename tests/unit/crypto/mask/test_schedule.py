"""The key schedule: known answers, equal keys on all devices, and no way back to an earlier round or run."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.mask.derivation import derive
from crypto.mask.schedule import RoundKeys, RunChain, VersionKey, state_digest
from shoal import limits
from shoal.errors import ConfigError, IntegrityError, UsageError
from shoal.types import Segment
from tests.helpers.plans import run_plan

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "vectors" / "mask.json").read_text(encoding="ascii"))
SECRET = bytes(range(32))
RUN = b"run-1"


def version(number: int = 3, secret: bytes = SECRET) -> VersionKey:
    return VersionKey("reef", number, secret)


def chain(run_id: bytes = RUN, first_round: int = 1, run: int = 1) -> RunChain:
    key = version()
    key.skip_to_run(run)
    return key.begin_run(run_id, first_round)


def secrets_of(keys: RoundKeys) -> set[bytes]:
    return {keys.mask.reveal(), keys.content}


@pytest.fixture
def key():
    return version()


@pytest.fixture
def steps():
    return chain()


def test_keys_match_the_known_answers() -> None:
    """Secrets, content keys and digest keys of two runs are those that an independent implementation computed."""
    known = VECTORS["schedule"]
    key = VersionKey(known["fleet"], known["version"], bytes.fromhex(VECTORS["secret"]))
    for run in known["runs"]:
        steps = key.begin_run(bytes.fromhex(run["run_id"]), run["rounds"][0]["round"])
        for answer in run["rounds"]:
            keys = steps.take()
            assert (keys.round, keys.mask.reveal().hex()) == (answer["round"], answer["mask"])
            assert keys.content.hex() == answer["content"]
            assert keys.state_digest(5, np.arange(4, dtype=np.float32)).hex() == answer["state_digest"]


@given(st.sets(st.integers(1, 12)), st.integers(1, 12))
def test_keys_do_not_depend_on_other_runs(begun: set[int], run: int) -> None:
    """Two parties have begun different runs before run ``run``, or none because the version was drawn later."""
    key = version()
    for number in sorted(n for n in begun if n < run):
        key.skip_to_run(number)
        key.begin_run(bytes([number]))
    key.skip_to_run(run)
    assert key.next_run == run
    keys = key.begin_run(RUN).take()
    assert (keys.round, secrets_of(keys)) == (0, secrets_of(chain(first_round=0, run=run).take()))
    assert not secrets_of(keys) & secrets_of(chain(first_round=0, run=run + 1).take()), "two runs of one id differ"
    assert key.next_run == run + 1


WHOLE = chain()
EVERY = [secrets_of(WHOLE.take()) for _ in range(200)]
"""The secrets of rounds 1 to 200, taken one after the other."""


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_no_two_rounds_share_a_key(gaps: list[int]) -> None:
    """Whichever rounds a device takes part in, all its secrets differ, and equal those of a device that missed none."""
    steps, taken = chain(), []
    for gap in gaps:
        steps.skip_to(steps.next_round + gap)
        taken.append(steps.take())
    found = [secret for keys in taken for secret in (keys.mask.reveal(), keys.content)]
    assert len(set(found)) == len(found)
    assert [secrets_of(keys) for keys in taken] == [EVERY[keys.round - 1] for keys in taken]


def test_stolen_chain_opens_no_earlier_round(steps: RunChain) -> None:
    """From the secret of round 8 every later key follows, also after a restart, and none of the rounds before."""
    before = set().union(*(secrets_of(steps.take()) for _ in range(7)))
    stolen = RunChain("reef", RUN, 3, steps.next_round, steps.reveal())
    later = set().union(*(secrets_of(stolen.take()) for _ in range(20)))
    again = RunChain("reef", RUN, 3, steps.next_round, steps.reveal())
    assert not before & later
    assert secrets_of(steps.take()) == secrets_of(again.take()) <= later
    with pytest.raises(IntegrityError, match="can't be derived"):
        stolen.skip_to(3)


def test_stolen_version_opens_no_earlier_run(key: VersionKey) -> None:
    earlier = secrets_of(key.begin_run(b"a", 1).take())
    thief = VersionKey("reef", 3, key.reveal(), key.next_run)
    assert not earlier & secrets_of(thief.begin_run(b"a", 1).take())
    with pytest.raises(IntegrityError, match="can't be derived"):
        thief.skip_to_run(1)


def test_restored_version_masks_anew() -> None:
    """A backup brings the same secret back; the run id, drawn again, still makes every mask another one."""
    first, again = version().begin_run(b"a", 1).take(), version().begin_run(b"b", 1).take()
    assert not secrets_of(first) & secrets_of(again)


@pytest.mark.parametrize(
    "other",
    [
        VersionKey("cove", 3, SECRET).begin_run(RUN, 1),
        VersionKey("reef", 3, SECRET[::-1]).begin_run(RUN, 1),
        chain(first_round=2),
    ],
    ids=["fleet", "secret", "first round"],
)
def test_secret_and_first_round_change_all(other: RunChain) -> None:
    """Fleet secret and first round change every key."""
    other.skip_to(4)
    steps = chain()
    steps.skip_to(4)
    assert not secrets_of(steps.take()) & secrets_of(other.take())


@pytest.mark.parametrize("round_", [0, 1, 3 + limits.MAX_SKIPPED_ROUNDS])
def test_past_and_far_rounds_are_refused(round_: int) -> None:
    """Rounds that are past or too far ahead are refused."""
    steps = chain(first_round=2)
    before = steps.reveal()
    with pytest.raises(IntegrityError) as refused:
        steps.skip_to(round_)
    assert "admit" in refused.value.hint
    assert (steps.next_round, steps.reveal()) == (2, before)


@pytest.mark.parametrize("run_id", [b"", bytes(65)])
def test_run_id_of_a_wrong_length_is_refused(run_id: bytes, key: VersionKey) -> None:
    with pytest.raises(UsageError):
        key.begin_run(run_id, 1)
    assert (key.next_run, key.reveal()) == (1, SECRET)


@pytest.mark.parametrize("run", [0, 2, 4 + limits.MAX_SKIPPED_ROUNDS])
def test_past_and_far_runs_are_refused(run: int, key: VersionKey) -> None:
    """Runs that are past or too far ahead are refused."""
    key.skip_to_run(3)
    before = key.reveal()
    with pytest.raises(IntegrityError, match=f"run {run} of key version 3 can't be derived from those of run 3"):
        key.skip_to_run(run)
    assert (key.next_run, key.reveal()) == (3, before)


def test_a_damaged_secret_or_name_is_refused() -> None:
    with pytest.raises(IntegrityError):
        version(secret=bytes(31))
    with pytest.raises(IntegrityError):
        RunChain("reef", RUN, 3, 1, bytes(33))
    with pytest.raises(ConfigError):
        VersionKey("no/name", 3, SECRET)


def test_two_drawn_versions_differ() -> None:
    assert VersionKey.draw("reef", 1).reveal() != VersionKey.draw("reef", 1).reveal()


def test_the_mask_names_version_and_round(steps: RunChain) -> None:
    """Masks of two rounds have different key ids and different permutations."""
    segments = (Segment("cluster", 50),)
    keys = [derive(k.mask, k.context(bytes(32), "permutation", segments)) for k in (steps.take(), steps.take())]
    assert [(k.context.key_version, k.context.round) for k in keys] == [(3, 1), (3, 2)]
    assert keys[0].key_id != keys[1].key_id


def test_digests_tell_states_apart(steps: RunChain) -> None:
    """Model, round, run and single bits count, also the sign of a zero; the memory layout does not."""
    keys, later = steps.take(), steps.take()
    theta = np.array([0.0, 1.5, -2.0], np.float32)
    digests = {
        keys.state_digest(0, theta),
        keys.state_digest(1, theta),
        later.state_digest(0, theta),
        keys.state_digest(0, theta * np.float32(1.0000001)),
        keys.state_digest(0, np.array([-0.0, 1.5, -2.0], np.float32)),
        state_digest(keys.digest_key, b"run-2", 0, 1, theta),
    }
    assert len(digests) == 6
    assert keys.state_digest(0, theta.copy()) == state_digest(keys.digest_key, RUN, 0, 1, theta)
    assert keys.digest_key not in secrets_of(keys)


def test_nothing_shows_a_secret(key: VersionKey) -> None:
    steps = key.begin_run(RUN, 1)
    keys = steps.take()
    for secret, thing in ((key.reveal(), key), (steps.reveal(), steps), (keys.content, keys)):
        for text in (repr(thing), str(thing)):
            assert secret.hex() not in text
            assert repr(secret) not in text
        with pytest.raises(TypeError):
            pickle.dumps(thing)
        with pytest.raises(TypeError):
            copy.copy(thing)


def test_run_of_plan_is_found_by_its_number(key: VersionKey) -> None:
    plan = run_plan(run=4, run_id=RUN)
    assert secrets_of(key.begin_run_of(plan).take()) == secrets_of(chain(first_round=0, run=4).take())
    assert key.next_run == 5
    with pytest.raises(IntegrityError, match="the keys of run 4"):
        key.begin_run_of(plan)


def test_context_of_a_plan_names_everything() -> None:
    """The context of a plan names its task mode and layout and the round of the keys."""
    keys, plan = chain(first_round=4).take(), run_plan(mode="rotation")
    context = keys.context_of(plan)
    assert (context.fleet, context.run_id, context.key_version, context.round) == ("reef", RUN, 3, 4)
    assert (context.task_digest, context.mode, context.segments) == (plan.task_digest, "rotation", plan.mask_segments)


def test_peeked_keys_are_those_taken() -> None:
    """Keys that are peeked at are those that are taken and the chain stays."""
    steps = chain(first_round=2)
    later = chain(first_round=2)
    later.skip_to(4)
    assert secrets_of(steps.peek(4)) == secrets_of(later.peek(4)) == secrets_of(later.take())
    assert (steps.next_round, later.next_round) == (2, 5)
    with pytest.raises(IntegrityError, match="can't be derived"):
        later.peek(4)
