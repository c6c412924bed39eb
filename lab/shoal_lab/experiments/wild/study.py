"""The experiment ``wild``: every strategy on fleets that were not made for it, with one default setting for all.

Each run ends with a personal finish on every device (`shoal.simulation.engine.personal`), so that strategies are compared with
FedAvg and the same finish. Beside them: ``local`` trains every device alone, and ``true-groups`` is FedAvg within the true
groups. FeSEM can't find the number of groups and is given it (``--set given_groups=off`` takes its default).
FedProx and FedGrouProx need a proximal weight, which has no default, and are left out.

``--scenario`` names the fleet. Weights, limits and the smallest mean are those of ``shoal-fleet run start``, local training
is the default recipe, and ``--samples``, ``--rounds`` and ``--set test_images=N`` change sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shoal.errors import UsageError
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.wild import scenarios

ALGORITHMS: Final = ("cfl", "ifca", "fedgroup", "fesem", "one-shot", "fedavg", "local", "true-groups")


def run(options: Options, progress: Progress) -> Result:
    """Run ``wild``.

    Raises:
        UsageError: no scenario is named, or another number of devices is asked.
    """
    if options.scenario is None:
        raise UsageError("which scenario?", hint="shoal simulate wild --list names them; give one with --scenario")
    if options.devices is not None:
        raise UsageError("a scenario fixes the number of devices", hint="leave --devices out")
    from shoal_lab.experiments.wild import runs

    return runs.run(options, progress)


def described() -> Mapping[str, Mapping[str, Any]]:
    """Return the scenarios by name, as ``shoal simulate wild --list`` shows them."""
    return {
        name: {
            "title": s.title,
            "kind": scenarios.KINDS[s.kind],
            "data": s.data,
            "network": s.network if s.data in scenarios.IMAGES else "linear",
            "needs": list(s.needs),
        }
        for name, s in scenarios.SCENARIOS.items()
    }


EXPERIMENTS: Final = (
    Study(
        id="wild",
        paper="ours, docs/wild-fleets.md",
        title=f"{len(scenarios.SCENARIOS)} fleets unlike the papers', one default setting",
        algorithms=ALGORITHMS,
        published=dict.fromkeys(ALGORITHMS),
        runner=run,
        needs=scenarios.IMAGES + scenarios.NATURAL,
        figure="fleet",
        scenarios=described(),
    ),
)
