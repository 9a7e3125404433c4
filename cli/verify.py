"""`convtools verify`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convtools.cli.ending import complain, finish
from convtools.cli.render import human

if TYPE_CHECKING:
    from convtools.slicing.verification import Verification


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--source", metavar="SRC", help="Also compare with SRC, from which it was cut, byte for byte.")
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that read."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: Path, source: str | None, workers: int, as_json: bool) -> None:
    """Check that config.json and every tensor of checkpoint PATH are what its manifest says.

    Exits with 0 where all is whole, with 1 where something is not, and with 2 where that could not be found
    out: no manifest, no checkpoint, files that cannot be read.
    """
    from convtools.errors import ConvtoolsError
    from convtools.slicing.verification import verify_slice

    try:
        found = verify_slice(path, source, workers=workers)
    except (ConvtoolsError, OSError) as error:
        complain(f"error: {error}")
        sys.exit(2)
    finish(0 if found.whole else 1, lambda: _show(found, as_json))


def _show(found: "Verification", as_json: bool) -> None:
    from convtools.errors import printable

    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        against = "its manifest" + (f" and {found.source}" if found.source else "")
        for fault in found.faults[:50]:
            click.echo(printable(f"{fault.tensor}: {fault.what}".replace("\n", "\\n")))
        if len(found.faults) > 50:
            click.echo(f"... and {len(found.faults) - 50} more")
        count = len(found.faults)
        verdict = "whole" if found.whole else f"{count} fault{'s' * (count != 1)}"
        config = "and config.json" if found.config_covered else "(config.json not: the manifest has no hash)"
        what = f"{found.tensors} tensors {config}, {human(found.nbytes)}, compared with {against}"
        click.echo(printable(f"{verdict}: {what}"))
