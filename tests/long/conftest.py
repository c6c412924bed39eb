"""The Debian packages, built once for all tests that install them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.debian import BUILDER
from tests.helpers.trees import ROOT

BUILD_S = 1800


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Return name -> file of the packages: those of SHOAL_PACKAGES=dist, or new ones."""
    folder = Path(os.environ.get("SHOAL_PACKAGES", ""))
    if not os.environ.get("SHOAL_PACKAGES"):
        folder = tmp_path_factory.mktemp("packages")
        command = [sys.executable, str(BUILDER), "--out", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=BUILD_S)
    return {file.name.split("_")[0]: file for file in sorted(folder.glob("shoal-*_amd64.deb"))}
