"""Studies by name, at the size that a test asks for."""

from __future__ import annotations

from typing import Any

from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Options, Quiet


def run(name: str, data_dir: Any = None, *, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the data of one run of a study, with a permutation as the mask unless another is asked."""
    given = {key: str(value) for key, value in (settings or {}).items()}
    chosen = Options(data_dir=data_dir, settings=given, **{"mask": "permutation", **options})
    return registry.find(name).run(chosen, Quiet())
