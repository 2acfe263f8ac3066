"""Arguments and options that commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[Path, typer.Argument(metavar="ROOT", help="A store's root.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
