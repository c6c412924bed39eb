"""Masks are repeated after a restore only if the run's id is repeated as well."""

from types import SimpleNamespace

import pytest
from shoal_lab.bench.attacks.past.restored import ROUNDS, restored

from shoal.owner.runs import plan

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_no_mask_is_repeated_in_a_run_of_the_same_number(lab):
    found = restored(lab, "rotation")
    assert (found.name, found.keys, found.success, found.works) == ("restored-owner", "round", 0, False)
    assert "in run 1 after" in found.note
    assert "run 1 before" in found.note


def test_all_masks_are_repeated_with_a_repeated_run_id(lab, monkeypatch):
    monkeypatch.setattr(plan, "os", SimpleNamespace(urandom=lambda n: bytes([7]) * n))
    found = restored(lab, "rotation")
    assert found.success == ROUNDS
    assert found.works
