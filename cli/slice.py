"""`convtools slice`."""

import json
import os
import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convtools.cli.progress import progress_bar
from convtools.cli.render import human

if TYPE_CHECKING:
    from convtools.slicing.report import SliceReport


@click.command()
@click.argument("src")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--layers", metavar="LIST", help="Layers to keep: numbers and inclusive ranges, such as 0-3,7.")
@click.option(
    "--cover", type=click.Choice(["blocks", "types", "pairs"]),
    help="Choose the cheapest layers that hold every kind of block (the default), every type of layer, "
    "or every pair of neighbours.",
)  # fmt: skip
@click.option(
    "--mtp", type=click.Choice(["keep", "drop"]), default="keep", show_default=True, help="The MTP head."
)
@click.option("--experts", type=int, metavar="N", help="Keep the first N routed experts of every MoE layer.")
@click.option(
    "--not-per-layer", multiple=True, metavar="KEY",
    help="A list in the config that is as long as the model has layers, and is not one entry a layer.",
)  # fmt: skip
@click.option(
    "--layer-prefix", metavar="NAME", help="The stack of layers, where it is unclear: model.layers."
)
@click.option("--iteration", metavar="N|release", help="Which saved iteration of a Megatron source.")
@click.option(
    "--hf-config", type=click.Path(exists=True, path_type=Path),
    help="Folder with the config.json (tokenizer, ...) for a Megatron source that keeps none.",
)  # fmt: skip
@click.option(
    "--allow-inexact", is_flag=True,
    help="Round norms that only Megatron centres on zero, where the dtype cannot hold them exactly.",
)  # fmt: skip
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of weights to write.")
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that copy."
)
@click.option(
    "--fsync/--no-fsync", default=True, help="Bring every file to disk before publishing.  [default: fsync]"
)
@click.option("--dry-run", is_flag=True, help="Choose, plan and account for every tensor; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(src: str, dst: Path, as_json: bool, iteration: str | None, **choices: Any) -> None:
    """Cut some layers out of checkpoint SRC into a small checkpoint DST that any engine loads.

    SRC is a Hugging Face directory, a Megatron checkpoint, or org/name[@revision] on the Hub, of which
    only what the slice needs is fetched.
    """
    from convtools.slicing.build import slice_checkpoint
    from convtools.slicing.options import SliceOptions

    chosen = int(iteration) if iteration and iteration.isdecimal() and len(iteration) < 20 else iteration
    options = SliceOptions(iteration=chosen, **choices)
    report = slice_checkpoint(src, dst, options, None if as_json else progress_bar)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)


def _print(report: "SliceReport") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from convtools.errors import capped, printable
    from convtools.slicing.choose import ADDED, ASKED

    # into a file or a pipe lines are as long as they are, without the blanks that fill up a table
    wide = not sys.stdout.isatty()
    console = Console(file=StringIO(), width=10_000, color_system=None) if wide else Console()
    layers = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("layer", "right"),
        ("source", "right"),
        ("kind", "left"),
        ("why", "left"),
        ("bytes", "right"),
    ):
        layers.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for line in report.layers:
        why = line.why if line.why in (ASKED, ADDED) else f"the cheapest {line.why}"
        more = f"{why}; {line.others} more like it" if line.others else f"{why}; the only one"
        layers.add_row(str(line.layer), str(line.source), Text(line.kind), Text(more), human(line.nbytes))
    count = report.mtp_tensors
    are = "is" if count == 1 else "are"
    mtp = f"{count} of the tensors {are} the MTP head's" if count else ""
    layers.add_row("", "", "outside the layers", mtp, human(report.other_nbytes))
    console.print(layers, soft_wrap=True)
    console.print()
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    did = "would be written" if report.dry_run else "written"
    revision = f" at {report.revision[:12]}" if report.revision else ""
    files = f"{report.files} file{'s' * (report.files != 1)} of weights"
    rows = [
        ("source", f"{report.source}{revision} ({report.source_format}), {report.source_layers} layers"),
        (did, f"{report.target}: {report.tensors} tensors, {human(report.payload_nbytes)} in {files}"),
        ("checked", report.checked),
    ]
    if report.fetched_nbytes is not None:
        rows.append(("fetched", f"{human(report.fetched_nbytes)} of weights"))
    rows += [("not kept", f"{n} tensors {reason}") for reason, n in report.dropped.items()]
    rows += [("config", change) for change in report.config_changes]
    reasons: dict[str, list[str]] = {}
    for name, reason in report.left_out:
        reasons.setdefault(reason, []).append(name)
    rows += [
        ("left out", f"{len(names)} ({reason}): {capped(names, 3)}") for reason, names in reasons.items()
    ]
    rows += [("note", note) for note in report.notes]
    if not report.dry_run:
        rows.append(("time", f"{report.seconds:.1f} s"))
    for label, text in rows:
        facts.add_row(f"[bold]{label}[/]", Text(printable(text)))
    console.print(facts, soft_wrap=True)
    if isinstance(console.file, StringIO):
        click.echo("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()))
