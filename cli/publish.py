"""`convtools publish`."""

import json
import os
import sys
from pathlib import Path

import click

from convtools.cli.progress import progress_bar
from convtools.cli.render import human


@click.command()
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo_id", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option("--revision", metavar="BRANCH", help="Branch to publish to; main when left out.")
@click.option("--overwrite-card", is_flag=True, help="Replace a README.md that convtools did not write.")
@click.option("--replace", is_flag=True, help="Delete weights in the repository that DIR does not have.")
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that read."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    path: Path,
    repo_id: str,
    private: bool,
    revision: str | None,
    overwrite_card: bool,
    replace: bool,
    workers: int,
    as_json: bool,
) -> None:
    """Put checkpoint DIR on the Hugging Face Hub as ORG/NAME, with a model card and a manifest.

    The weights are checked against the manifest first. A run that broke off can be run again.
    """
    from convtools.errors import capped, printable
    from convtools.slicing.publish import publish
    from convtools.stores.hub_errors import quiet

    if as_json or not sys.stderr.isatty():
        quiet()
    report = publish(
        path,
        repo_id,
        private=private,
        revision=revision,
        overwrite_card=overwrite_card,
        replace=replace,
        workers=workers,
        bar=None if as_json else progress_bar,
    )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    lines = [
        f"published  {report.url}{' (new)' if report.created else ''}",
        f"commit     {report.commit}",
        f"files      {report.files}, {human(report.nbytes)}",
        f"manifest   {report.manifest}",
        f"card       {report.card}",
    ]
    if report.removed:
        lines.append(f"deleted    {capped(report.removed)}")
    lines += [f"not sent   {name}: {reason}" for name, reason in report.not_published[:20]]
    if len(report.not_published) > 20:
        lines.append(f"not sent   ... and {len(report.not_published) - 20} more")
    lines += [f"note       {note}" for note in report.notes]
    click.echo(printable("\n".join(lines)))
