"""A thief finds secrets wherever a device's files and objects hold them."""

import numpy as np
from shoal_lab.bench.attacks.past.theft import LARGEST_FILE, OUTSIDE, _in_memory, steal

from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from shoal.membership.directory import KEY_FILE, RECEIVING_FILE
from tests.helpers.masks import key_of

SECRET, HIDDEN = bytes(range(32)), bytes(range(1, 33))


class Device:
    def __init__(self, *things):
        self.things = things


def test_every_offset_of_small_private_files_is_searched(tmp_path):
    identity = Identity.generate("dev-00")
    identity.save(tmp_path / KEY_FILE)
    ReceivingSecrets.generate().save(tmp_path / RECEIVING_FILE)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "index.bin").write_bytes(b"head" + SECRET + b"tail")
    (tmp_path / "state.bin").write_bytes(bytes(LARGEST_FILE) + HIDDEN)
    (tmp_path / "roster.signed").write_bytes(HIDDEN)
    found = steal(tmp_path)
    assert SECRET in found.secrets
    assert HIDDEN not in found.secrets
    assert len(found.privates) > 1
    assert found.privates[0] is not None
    assert found.masks == ()


def test_memory_is_searched_through_objects_and_closures():
    key = key_of("rotation", 4)
    device = Device({"a": [SECRET]}, lambda: HIDDEN, key, np.zeros(3), b"short")
    hidden = HIDDEN
    device.things[0]["later"] = lambda: hidden
    found = set(_in_memory(device))
    assert {SECRET, HIDDEN, key} <= found
    assert b"short" not in found


def test_the_search_stays_in_the_device():
    assert set(_in_memory(Device(np, Device, *OUTSIDE))) == set()


def test_loot_of_two_times_is_joined(tmp_path):
    Identity.generate("dev-00").save(tmp_path / KEY_FILE)
    ReceivingSecrets.generate().save(tmp_path / RECEIVING_FILE)
    before = steal(tmp_path)
    (tmp_path / "membership.bin").write_bytes(SECRET)
    both = before | steal(tmp_path)
    assert both.secrets == before.secrets | {SECRET}
    assert len(both.privates) == 2 * len(before.privates)
