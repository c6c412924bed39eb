"""What makes a standing order: its options, and its signature under newer keys."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from crypto.seal.envelope import GroupKey, open_from_group, read_head
from shoal import limits
from shoal.errors import ConfigError, IntegrityError, UsageError
from shoal.membership.signed_plans import open_package
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.keys.vault import run_file
from shoal.owner.runs.standing import last_run, order_in_force, sign_again, signed_schedule
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage
from tests.helpers.fleets import make_fleet

YEAR_S = 365 * 24 * 3600


def fleet_until(expires_at_s):
    return SimpleNamespace(roster=SimpleNamespace(expires_at_s=expires_at_s))


def test_a_schedule_of_options():
    end = int(time.time()) + YEAR_S
    made = signed_schedule(fleet_until(end), "12h", 30, "")
    assert (made.count, made.interval_s, made.until_s, made.turn) == (30, 12 * 3600, end, 0)
    assert made.order != signed_schedule(fleet_until(end), "12h", 30, "").order


@pytest.mark.parametrize(
    ("every", "at_most", "until", "error"),
    [
        ("1w", 3, "", "'1w' is not a duration"),
        ("0d", 3, "", "'0d' is not a duration"),
        ("1d", None, "", "--at-most is missing"),
        ("1d", 0, "", "the number of scheduled runs is from 1"),
        ("1d", limits.MAX_SCHEDULED_RUNS + 1, "", "the number of scheduled runs"),
        ("1d", 3, "tomorrow", "--until tomorrow: a date"),
        ("1d", 3, "2020-01-01", "is over"),
        ("1d", 3, "2999-01-01", "the roster expires"),
        ("999999d", 3, "", "'999999d' is not a duration"),
    ],
)
def test_bad_options(every, at_most, until, error):
    with pytest.raises((UsageError, ConfigError), match=error) as caught:
        signed_schedule(fleet_until(int(time.time()) + YEAR_S), every, at_most, until)
    assert caught.value.hint or "scheduled runs" in error


def test_the_same_order_under_newer_keys(tmp_path):
    """Task and origins are sealed again, and number, id and end stay; a lost version of keys is an error."""
    schedule = signed_schedule(fleet_until(int(time.time()) + YEAR_S), "1d", 3, "")
    with make_fleet(tmp_path / "fleet", schedule=schedule) as fleet:
        owner, before = fleet.stage.fleet, fleet.plan
        assert order_in_force(owner) == before
        assert (last_run(before), owner.secrets.next_run) == (3, 5)
        later = signed_plans(owner, pytest.fail, turns=True)
        assert [(plan.run, plan.run_id) for plan in later] == [(1 + t, schedule.run_id(t)) for t in range(3)]
        owner.rotate()
        after = sign_again(owner)
        assert after == replace(before, key_version=after.key_version, roster_sequence=after.roster_sequence)
        package = decode(run_file(owner.path, 1).read_bytes(), RunPackage)
        assert open_package(package, owner.owner.member.sign_key) == after
        keys = owner.version_key.peek_run(4, schedule.order)
        head, at = read_head(package.task)
        group = GroupKey(owner.name, "content", keys.content)
        task = open_from_group(group, package.task, head, at, owner.owner.member.sign_key)
        assert bytes(task) == fleet.bundle.to_bytes()
        owner.rotate()
        owner.forget_versions_before(owner.roster.keys_since)
        with pytest.raises(IntegrityError, match="are not stored any more"):
            sign_again(owner)


def test_growth_of_data():
    fleet = fleet_until(int(time.time()) + YEAR_S)
    assert signed_schedule(fleet, "1h", 3, "", "20%").growth == 20
    for bad in ("0%", "1001", "a lot"):
        with pytest.raises(UsageError, match="per cent from 1 to 1000"):
            signed_schedule(fleet, "1h", 3, "", bad)
