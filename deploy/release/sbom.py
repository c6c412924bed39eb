"""The list of a release's dependencies, as a CycloneDX document: the packages of each party, with versions and licences.

    python -m deploy.release.sbom WHEEL     # printed

A wheel names ranges of versions. The document names the versions that are installed beside this program, which are those that
the release was tested with. Example: with numpy 2.3.1 installed it has the component ``pkg:pypi/numpy@2.3.1``, and an arrow from
Shoal to it. The same wheel and the same installed packages give the same bytes.
"""

from __future__ import annotations

import email.parser
import hashlib
import importlib.metadata
import json
import sys
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PARTIES: Final = ("edge", "aggregator", "fleet")
"""Extras whose packages are listed: those of the parties of a fleet. The others are for researchers and for tests."""
SPEC_VERSION: Final = "1.6"


class SbomError(Exception):
    """A package that the list needs is not installed beside this program."""


@dataclass(slots=True)
class _Found:
    """A package that is installed, the packages that it requires, and the ways to it: our extra, and its own extras."""

    package: importlib.metadata.Distribution
    requires: set[str] = field(default_factory=set)
    ways: set[tuple[str, frozenset[str]]] = field(default_factory=set)

    @property
    def extras(self) -> set[str]:
        """The extras of ours that lead to the package; the empty one if every machine has it."""
        return {extra for extra, _ in self.ways}


def sbom(wheel: Path, made_at_s: int) -> bytes:
    """Return the CycloneDX document of a wheel.

    Args:
        wheel: of Shoal.
        made_at_s: unix seconds that the document states as its time.

    Raises:
        SbomError: a package that a party needs is not installed here.
    """
    data = wheel.read_bytes()
    metadata = _metadata(wheel)
    ours = f"pkg:pypi/{canonicalize_name(metadata['Name'])}@{metadata['Version']}"
    direct, found = set[str](), dict[str, _Found]()
    for extra in ("", *PARTIES):
        direct |= _follow(metadata.get_all("Requires-Dist") or [], {extra}, extra, found)
    digest = hashlib.sha256(data).hexdigest()
    document = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{ours}#{digest}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made_at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": metadata["Name"],
                "version": metadata["Version"],
                "purl": ours,
                "licenses": _licenses(metadata),
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
        },
        "components": [_component(one) for _, one in sorted(found.items())],
        "dependencies": [
            {"ref": ours, "dependsOn": sorted(_purl(found[name].package) for name in direct)},
            *(
                {"ref": _purl(one.package), "dependsOn": sorted(_purl(found[name].package) for name in one.requires)}
                for _, one in sorted(found.items())
            ),
        ],
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.parser.BytesParser().parsebytes(archive.read(name))


def _follow(requirements: Iterable[str], extras: set[str], origin: str, found: dict[str, _Found]) -> set[str]:
    """Add the packages that ``requirements`` lead to, all the way; return the names of the nearest.

    Args:
        requirements: as in a package's metadata.
        extras: of that package; the empty one stands for its unconditional requirements.
        origin: the extra of ours that leads here.
        found: by name; added to.
    """
    nearest: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if marker is None and "" not in extras:
            continue
        name = canonicalize_name(requirement.name)
        nearest.add(name)
        if name not in found:
            try:
                found[name] = _Found(importlib.metadata.distribution(name))
            except importlib.metadata.PackageNotFoundError as error:
                machine = f"a machine with shoal[{origin}]" if origin else "every machine"
                raise SbomError(f"{name} is not installed here, and {machine} has it: make clean, then make") from error
        one, way = found[name], (origin, frozenset(requirement.extras))
        if way not in one.ways:
            one.ways.add(way)
            one.requires |= _follow(one.package.requires or [], {"", *requirement.extras}, origin, found)
    return nearest


def _purl(package: importlib.metadata.Distribution) -> str:
    version = package.version.replace("+", "%2B")  # a local version, as of torch's CPU build
    return f"pkg:pypi/{canonicalize_name(package.name)}@{version}"


def _component(one: _Found) -> dict[str, Any]:
    """Return a package's entry; ``scope`` is required if every machine of a fleet has it."""
    licenses = _licenses(one.package.metadata)
    return {
        "type": "library",
        "bom-ref": _purl(one.package),
        "name": one.package.name,
        "version": one.package.version,
        "scope": "required" if "" in one.extras else "optional",
        "purl": _purl(one.package),
        **({"licenses": licenses} if licenses else {}),
        "properties": [{"name": "shoal:extra", "value": extra} for extra in sorted(one.extras - {""})],
    }


def _licenses(metadata: Any) -> list[Mapping[str, Any]]:
    """Return a package's licence: its SPDX expression, else the names of its classifiers, else its first line."""
    expression = metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    named = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    text = (metadata.get("License") or "").strip().splitlines()
    return [{"license": {"name": name}} for name in named or text[:1]]


def main() -> None:
    """Print the document of the wheel that is named on the command line."""
    sys.stdout.buffer.write(sbom(Path(sys.argv[1]), 0))


if __name__ == "__main__":
    main()
