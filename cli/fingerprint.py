"""`convtools fingerprint`."""

import json
import os
import sys
import time
from pathlib import Path

import click

from convtools.cli.ending import complain, finish
from convtools.cli.progress import progress_bar
from convtools.cli.render import human


@click.command()
@click.argument("path")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    help="The manifest to write.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Let -o replace an older manifest of this command.")
@click.option("--xxh3", is_flag=True, help="Also hash every tensor's bytes in order, with XXH3-128.")
@click.option("--iteration", metavar="N|release", help="Which saved iteration of a Megatron checkpoint.")
@click.option(
    "--hf-config", type=click.Path(exists=True, path_type=Path), help="Folder with the model's config.json."
)
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that read."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    path: str,
    output: Path,
    overwrite: bool,
    xxh3: bool,
    iteration: str | None,
    hf_config: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Write one hash for every tensor of checkpoint PATH, whatever format it is in, as a manifest.

    Two checkpoints of the same weights have the same hashes, in any format and at any parallel layout.

    Exits with 0 where the manifest was written, and with 2 where anything failed.
    """
    from convtools.errors import ConvtoolsError, UsageError

    chosen = int(iteration) if iteration and iteration.isdecimal() and len(iteration) < 20 else iteration
    try:
        if workers < 1:
            raise UsageError(f"--workers {workers} is no number of threads", expected="at least 1")
        _check_output(output, overwrite)
        lines = _write(path, output, xxh3, chosen, hf_config, workers, as_json)
    except (ConvtoolsError, OSError) as error:
        complain(f"error: {error}")
        sys.exit(2)
    finish(0, lambda: click.echo("\n".join(lines)))


def _write(
    path: str,
    output: Path,
    xxh3: bool,
    iteration: int | str | None,
    hf_config: Path | None,
    workers: int,
    as_json: bool,
) -> list[str]:
    """Hash, write the manifest, and return what there is to say."""
    from convtools.disk import writing
    from convtools.equality.fingerprint import ALGORITHM, path_used
    from convtools.equality.fingerprint_store import fingerprint
    from convtools.errors import printable
    from convtools.layout.region import Region
    from convtools.manifest import encode
    from convtools.stores.base import DTYPE_NBYTES

    began = time.monotonic()
    manifest = fingerprint(
        path, xxh3=xxh3, iteration=iteration, hf_config=hf_config, workers=workers,
        bar=None if as_json else progress_bar,
    )  # fmt: skip
    seconds = time.monotonic() - began
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with writing(output.parent):
            aside.write_bytes(encode(manifest))
            os.replace(aside, output)
    finally:
        aside.unlink(missing_ok=True)
    assert manifest.source is not None
    tensors = manifest.tensors.values()
    nbytes = sum(Region.whole(t.shape).numel * DTYPE_NBYTES.get(t.dtype, 0) for t in tensors)
    if as_json:
        facts = {
            "output": str(output), "format": manifest.source.format, "tensors": len(tensors), "bytes": nbytes,
            "algorithm": ALGORITHM, "computed_by": path_used(), "seconds": seconds, "notes": manifest.notes,
        }  # fmt: skip
        return [json.dumps(facts, indent=2)]
    count = f"{len(tensors)} tensor" + ("" if len(tensors) == 1 else "s")
    return [
        printable(f"{output}: {count}, {human(nbytes)} ({manifest.source.format})"),
        f"{ALGORITHM}, computed by: {path_used()}, {seconds:.1f} s",
        *(printable(f"note: {note}") for note in manifest.notes),
    ]


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise StorageError where the manifest cannot be written, or would replace anything but an older one."""
    from convtools.errors import CheckpointError, StorageError
    from convtools.manifest import read_manifest

    if not output.parent.is_dir():
        raise StorageError(f"could not write `{output}`: there is no folder `{output.parent}`")
    if not os.path.lexists(output):
        return
    try:
        older = read_manifest(output)
    except CheckpointError as error:
        raise StorageError(
            f"`{output}` exists, and is no manifest",
            found=error.what,
            fix="choose another name, or remove it",
        ) from None
    if older.layers is not None or older.config is not None:
        raise StorageError(
            f"`{output}` is the manifest of a slice, which says more than hashes: it is not replaced",
            fix="choose another name, or remove it",
        )
    if not overwrite:
        raise StorageError(f"`{output}` exists", fix="choose another name, or pass --overwrite")
