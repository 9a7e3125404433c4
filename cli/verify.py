"""`convtools verify`."""

import json
import os
import sys
from pathlib import Path

import click

from convtools.cli.render import human


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--source", metavar="SRC", help="Also compare with SRC, from which it was cut, byte for byte.")
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that read."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: Path, source: str | None, workers: int, as_json: bool) -> None:
    """Check that every tensor of checkpoint PATH is what its manifest says. Exits with 1 where one is not."""
    from convtools.errors import printable
    from convtools.slicing.verification import verify_slice

    found = verify_slice(path, source, workers=workers)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        against = "its manifest" + (f" and {found.source}" if found.source else "")
        for fault in found.faults[:50]:
            click.echo(printable(f"{fault.tensor}: {fault.what}"))
        if len(found.faults) > 50:
            click.echo(f"... and {len(found.faults) - 50} more")
        verdict = "whole" if found.whole else f"{len(found.faults)} faults"
        click.echo(
            printable(f"{verdict}: {found.tensors} tensors, {human(found.nbytes)}, compared with {against}")
        )
    sys.exit(0 if found.whole else 1)
