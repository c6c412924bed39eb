"""A run's directory, as the aggregator stores it, as a still of the fleet page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aggregator.storage.store import read_plan, take_records
from shoal.errors import ConfigError
from shoal.page.history import RunHistory
from shoal.page.page import write_still
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPlan

NOTE: Final = "From the rounds that the aggregator has stored."


def run_report(directory: Path, file: Path) -> None:
    """Write the page of the run in ``directory``, which its aggregator may be writing, to a file.

    Raises:
        ConfigError: no run was started in that directory, or the file can't be written.
        IntegrityError: its database is damaged, or another version has written it.
    """
    encoded = read_plan(directory)
    if encoded is None:
        raise ConfigError(
            f"{directory} holds no run",
            hint="give a run's directory at the aggregator, such as server/run-000001, or a copy of it",
        )
    plan = decode(encoded, RunPlan)
    run = RunHistory(name=f"run {plan.run}", algorithm=plan.recipe.algorithm, rounds=plan.recipe.rounds)
    take_records(directory, 0, run.add)
    write_still(file, plan.fleet, [run.document()], note=f"{plan.recipe.algorithm}. {NOTE}")
