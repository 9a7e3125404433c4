"""`convtools inspect`."""

import json
from pathlib import Path

import click

from convtools.cli.render import human
from convtools.errors import UsageError, printable, tick


@click.command()
@click.argument("path", metavar="PATH")
@click.option("--iteration", metavar="N|release", help="Which saved iteration of a Megatron checkpoint.")
@click.option(
    "--hf-config", type=click.Path(exists=True, path_type=Path), help="Folder with the model's config.json."
)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, iteration: str | None, hf_config: Path | None, tensors: bool, as_json: bool) -> None:
    """Say what checkpoint PATH is: format, family, layers, sizes, layout. Reads no weights."""
    from convtools.inspection import inspect

    if "://" in path:
        raise UsageError(
            f"{tick(path)} is a URL: inspect reads checkpoints", expected="a checkpoint's folder",
            fix="give its path" if path.startswith("file:")
            else "engines are taken by `convtools refit`, `refit check` and `compare`",
        )  # fmt: skip
    chosen = int(iteration) if iteration and iteration.isdecimal() and len(iteration) < 20 else iteration
    found = inspect(Path(path), iteration=chosen, hf_config=hf_config)
    if as_json:
        click.echo(json.dumps(found.to_dict(tensors=tensors), indent=2))
        return
    facts = [
        ("path", found.path),
        ("format", found.format + (f", iteration {found.iteration}" if found.iteration is not None else "")),
        (
            "family",
            found.family or f"unknown ({', '.join(found.architectures) or 'no architectures in the config'})",
        ),
    ]
    if found.pattern:
        facts += [("pattern", found.pattern), ("layers", str(found.layers))]
    facts += [
        (
            "tensors",
            f"{len(found.tensors)}: " + ", ".join(f"{n} {d}" for d, n in sorted(found.dtypes.items())),
        ),
        ("parameters", f"{found.parameters:,}"),
        ("bytes", f"{found.nbytes:,} ({human(found.nbytes)})"),
    ]
    if found.layout:
        facts.append(("saved at", " ".join(f"{axis}={n}" for axis, n in found.layout.items())))
    facts += [("encoding", f"{text}: not converted") for text in found.encodings]
    if found.left_out:
        facts.append(("not weights", f"{found.left_out} stored objects or files"))
    facts += [("note", note) for note in found.notes]
    for label, text in facts:
        click.echo(f"{label:<12}{printable(text)}")
    if tensors:
        for t in found.tensors:
            shape = "x".join(map(str, t.shape)) or "scalar"
            click.echo(
                f"  {printable(t.name)}  {t.dtype}  {shape}"
                + (f"  in {t.parts} parts" if t.parts > 1 else "")
            )
