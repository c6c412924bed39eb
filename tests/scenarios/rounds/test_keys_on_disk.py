"""What a thief reads in a device's folder after a round: no key of one whose state is stored, in any file, whatever its name."""

from tests.helpers.fleets import make_fleet


def raw(directory):
    """Return the bytes of all files below a folder."""
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def secrets_of(device):
    """Return the secrets that a device must hold now, each with its kind and number: chain, pending rounds, receiving keys."""
    store, receiving = device.runtime._models._store, device.runtime._membership.receiving
    found = {store._chain.reveal(): ("chain", store._chain.next_round)}
    for round_, keys in store.pending.items():
        found |= {keys.mask.reveal(): ("mask", round_), keys.content: ("content", round_)}
    for number, key in enumerate(receiving.privates, receiving.first):
        found[key.private_bytes_raw()] = "receiving", number
    return found


def test_keys_of_finished_rounds_are_gone(tmp_path):
    """Each device's files hold what it still needs, and nothing of what it had in earlier rounds."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=12) as fleet:
        seen = {name: {} for name in fleet.devices}
        gone = set()
        for closed in range(1, 12):
            fleet.run_until(lambda n=closed: fleet.closed() >= n, 20)
            if closed == 6:
                fleet.stage.fleet.rotate()
                fleet.publish()
            for name, device in fleet.devices.items():
                now, data = secrets_of(device), raw(fleet.stage.device_dir(name))
                assert all(secret in data for secret in now), "a search for it would find it"
                stored = 2 * ((fleet.closed() + 1) // 2)  # in the newest even round
                assert min(number for kind, number in now.values() if kind == "mask") >= max(stored, 1)
                seen[name] |= now
                old = seen[name].keys() - now.keys()
                assert [seen[name][secret] for secret in old if secret in data] == []
                gone |= {seen[name][secret] for secret in old}
        kinds = [kind for kind, _ in gone]
        assert {kind: kinds.count(kind) for kind in kinds} == {"chain": 5, "mask": 10, "content": 10, "receiving": 1}
