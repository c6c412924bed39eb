"""Arguments and options that several commands of `shoal-fleet` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES

Directory = Annotated[Path, typer.Argument(help="The owner's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Ca = Annotated[Path | None, typer.Option(help="CA certificates for mqtts; default: broker-config's.")]
Cert = Annotated[Path | None, typer.Option(help="Client certificate.")]
Key = Annotated[Path | None, typer.Option(help="Client certificate's key.")]
ChunkBytes = Annotated[
    int,
    typer.Option(
        help="Largest chunk to send, for a broker that takes small packets only.",
        min=LEAST_CHUNK_BYTES,
        max=CHUNK_BYTES,
    ),
]
