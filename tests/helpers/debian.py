"""The builder of the Debian packages, deploy/debian/build.py, which is a script and no module of a package."""

from __future__ import annotations

import importlib.util
import sys

from tests.helpers.trees import ROOT

BUILDER = ROOT / "deploy" / "debian" / "build.py"


def load_builder():
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("debian_build", BUILDER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
