"""Run the pages and the notebook of docs/examples, and write their pictures and the notebook's outputs.

    python docs/run_examples.py --write     # without --write the pages' output is printed

A page's Python blocks are run one after another; a ``text`` block right after one has its output, which a test compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parent
EXAMPLES: Final = DOCS / "examples"
PICTURES: Final = DOCS / "pictures"
NOTEBOOK: Final = EXAMPLES / "first-steps.ipynb"
CELL_S: Final = 120
"""Longest time of a notebook's cell."""
_BLOCK: Final = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


def run_page(page: Path, folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run a page's Python blocks in ``folder``, where they write their pictures.

    Yields:
        for each block what it printed, what the page says that it prints, and the names that it and those before have defined.
    """
    names: dict[str, Any] = {}
    for number, (code, shown) in enumerate(_BLOCK.findall(page.read_text())):
        printed = io.StringIO()
        before = Path.cwd()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"{page.name}, block {number + 1}", "exec"), names)
        finally:
            os.chdir(before)
        yield printed.getvalue(), shown, names


def run_notebook(path: Path = NOTEBOOK) -> Any:
    """Run a notebook in a kernel of its own and return it with its outputs, as nbformat has it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write pictures and outputs")
    write = parser.parse_args().write
    for page in sorted(EXAMPLES.glob("*.md")):
        with tempfile.TemporaryDirectory() as folder:
            for printed, _, _ in run_page(page, Path(folder)):
                sys.stdout.write(printed)
            if write:
                for picture in Path(folder).glob("*.png"):
                    shutil.copy(picture, PICTURES / f"examples-{picture.name}")
    notebook = run_notebook()
    if write:
        import nbformat

        for cell in notebook.cells:
            cell.metadata.clear()  # times of execution, which would change with every run
        nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
