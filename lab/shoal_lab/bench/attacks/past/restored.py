"""Masks that two runs of one number share, after the owner's directory was restored from a backup.

Ristenpart and Yilek, "When Good Randomness Goes Bad: Virtual Machine Reset Vulnerabilities" (2010). The owner backs up its
directory, signs a run and loses the directory; the restored one signs another run with the same number and the same secrets.
The devices are restored as well, which is the worst case: devices that still have their state refuse the second run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from crypto.mask.masking import mask
from shoal.simulation.loopback_fleet import BROKER_URL, LoopbackFleet
from shoal.simulation.process_fleet import Stage
from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.past.recording import quiet_fleet, watched_masking
from shoal_lab.bench.attacks.past.rounds import NEWCOMER, WITHIN_S, fleet_data, fleet_options

WHO: Final = "aggregator that sees both runs of an owner whose directory was restored from a backup"
ROUNDS: Final = 3


def masks_used(lab: Lab, mode: str, stage: Stage) -> tuple[int, list[bytes]]:
    """Run a fleet from its directories; return the run's number, and each mask used as the bytes of one masked probe."""
    data = fleet_data(lab)
    del data[NEWCOMER]
    options = fleet_options(mode, ROUNDS)
    with (
        quiet_fleet(),
        watched_masking() as seen,
        LoopbackFleet(stage.root, lab.bundle, data, options, origins=lab.origin[None].copy(), stage=stage) as fleet,
    ):
        fleet.run(WITHIN_S)
        number = fleet.plan.run
    probe = lab.rng("restored owner").standard_normal(lab.length).astype(np.float32)
    keys = {masking.key.key_id: masking.key for masking in seen.values()}
    return number, [mask(probe, key).values.tobytes() for key in keys.values()]


def restored(lab: Lab, mode: str) -> Result:
    """Return the number of masks of the restored owner's run that the run before had used."""
    names = tuple(sorted(fleet_data(lab).keys() - {NEWCOMER}))
    with tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder:
        stage = Stage(Path(folder, "owner-and-fleet"), BROKER_URL, names)
        backup = stage.copy_to(Path(folder, "backup"))
        (first, before), (second, after) = (masks_used(lab, mode, s) for s in (stage, backup))
    return Result(
        name="restored-owner",
        attacker=WHO,
        success=float(sum(used in before for used in after)),
        chance=0.0,
        unit="masks",
        margin=0.0,
        note=f"repeated, of {len(after)} in run {second} after the restore; run {first} before had {len(before)}",
        keys="round",
        devices=len(names),
    )


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the number of repeated masks."""
    return [restored(lab, mode)]


ATTACK: Final = Attack("restored owner", "Ristenpart and Yilek 2010 (virtual machine resets)", WHO, run)
