"""Installed packages that add strategies, splits and tasks: folders on the path with the metadata that an installer writes."""

from __future__ import annotations

import importlib
import sys


def install(folder, monkeypatch, group, entries, code="", package="extra"):
    """Make a package with one module and entry points, and put it on the path.

    ``entries`` are name -> attribute of the module, ``code`` is its source.
    """
    module = f"{package}_module"
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {module}:{attribute}\n" for name, attribute in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)  # of an earlier test
    importlib.invalidate_caches()
