"""Whether the packages of ours whose names are common are still ours: pip lets a distribution overwrite another's files.

PyPI has a `crypto`, and on a disk that ignores case pycryptodome's files are in ours too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError

DISTRIBUTION: Final = "shoal"
NAMES: Final = ("crypto", "aggregator", "edge_client")
MARK: Final = b"Shoal"
"""Is in the first file of each package. To read it takes a device less than 1 ms, and the metadata of all distributions 3 MB."""
ROOT: Final = Path(__file__).parents[2]
ADVICE: Final = (
    "pip uninstall {0}, then pip install --force-reinstall --no-deps shoal; or give Shoal its own environment"
)


def check_packages(root: Path = ROOT) -> None:
    """Check that no other distribution has overwritten a package of ours; a missing one is that of another party.

    Args:
        root: the folder with our packages.

    Raises:
        ConfigError: one has.
    """
    for name in NAMES:
        first = root / name / "__init__.py"
        with suppress(OSError):
            if MARK not in first.read_bytes():
                other = rivals(root).get(name, "another distribution")
                raise ConfigError(f"{first} is not Shoal's: {other} has overwritten it", hint=ADVICE.format(other))


def rivals(root: Path = ROOT) -> dict[str, str]:
    """Return the other distributions that have files in a package of ours: name of the package -> distribution."""
    from importlib.metadata import distributions

    found = {}
    for other in distributions(path=[str(root)]):
        for folder in {file.parts[0] for file in other.files or ()} if other.name != DISTRIBUTION else ():
            with suppress(OSError):  # one of them is not there, since case counts or a party lacks it
                if (name := folder.lower()) in NAMES and (root / folder).samefile(root / name):
                    found[name] = other.name
    return found
