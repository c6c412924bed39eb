"""Arguments and options that several commands of `shoal-fleet` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Directory = Annotated[Path, typer.Argument(help="The owner's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Ca = Annotated[Path | None, typer.Option(help="CA certificates for mqtts; default: broker-config's.")]
Cert = Annotated[Path | None, typer.Option(help="Client certificate.")]
Key = Annotated[Path | None, typer.Option(help="Client certificate's key.")]
