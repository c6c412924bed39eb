"""Arguments and options that several commands of `shoal-fleet` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Directory = Annotated[Path, typer.Argument(help="The owner's directory.")]
