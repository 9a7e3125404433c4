"""`slice_checkpoint`: open, choose, cut, write aside, publish."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from convtools.conversion.exactness import check_shifts
from convtools.conversion.plan import Resolver, SideFile, Target, verify
from convtools.conversion.run import (
    PaddingFound,
    Progress,
    Runner,
    check_files,
    make_files,
    write_side_files,
)
from convtools.equality.reading import Stamp, stamp, stamps
from convtools.errors import CheckpointError, StorageError
from convtools.manifest import MANIFEST_NAME, encode, hash_tensor
from convtools.slicing.check import check_model
from convtools.slicing.fetch import fetch
from convtools.slicing.manifest_of import hash_files, slice_manifest
from convtools.slicing.options import SliceOptions
from convtools.slicing.origin import Origin, open_origin
from convtools.slicing.plan_slice import SlicePlan, plan_slice
from convtools.slicing.report import SliceReport, slice_report
from convtools.staging import Staging, check_space
from convtools.stores.base import Payload
from convtools.stores.hf import is_hf

Bar = Callable[[int], AbstractContextManager[Progress]]


def slice_checkpoint(src: str, dst: str | Path, options: SliceOptions, bar: Bar | None = None) -> SliceReport:
    """Cut some layers out of checkpoint `src` into a new HF checkpoint `dst`: whole, or not there.

    `src` is a folder (Hugging Face or Megatron) or `org/name[@revision]` on the Hub. Every error is a
    ConvtoolsError; whatever happens `src` is left as it is.
    """
    began = time.monotonic()
    options.check()
    dst = Path(dst)
    hf_config = None if options.hf_config is None else Path(options.hf_config)
    origin = open_origin(str(src), iteration=options.iteration, hf_config=hf_config)
    plan = plan_slice(origin, options)
    verify(origin, plan.target)
    _check_ledger(origin, plan)
    checked = check_model(plan, origin)
    _check_exact(origin, plan, options)
    origin = _narrowed(origin, plan)
    files = stamps(origin.tensors)
    gc.collect()  # a large model's other tensors took more memory than it takes to write a slice
    run = _rehearse if options.dry_run else _publish
    notes, fetched = run(origin, plan, dst, options, bar, files)
    return slice_report(
        origin, plan, str(dst), checked=checked, notes=notes, fetched_nbytes=fetched,
        dry_run=options.dry_run, seconds=time.monotonic() - began,
    )  # fmt: skip


def _check_ledger(origin: Origin, plan: SlicePlan) -> None:
    """Every tensor of the source is kept, or counted under a reason."""
    used = len({kept.source for kept in plan.kept.values()})
    assert used + sum(plan.dropped.values()) == len(origin.hf), "a tensor is neither kept nor dropped"


def _check_exact(origin: Origin, plan: SlicePlan, options: SliceOptions) -> None:
    """Raise AccountingError where a norm of a Megatron source would be rounded, unless that is allowed."""
    if origin.conversion is not None:
        wanted = {kept.source for kept in plan.kept.values()}
        same = Target("hf", (), None, origin.dtypes)
        check_shifts(origin.conversion, same, allow_inexact=options.allow_inexact, only=wanted)


def _staging(dst: Path, origin: Origin, options: SliceOptions) -> Staging:
    return Staging(
        dst,
        src=[origin.root] if origin.root else [],
        overwrite=options.overwrite,
        replaceable=lambda path: None if is_hf(path) else "it does not look like an HF checkpoint",
        fsync=options.fsync,
    )


Done = tuple[tuple[str, ...], int | None]
"""(notes, bytes fetched from the Hub)."""


Files = Mapping[Path, Stamp | None]
"""The source's files as they were when it was opened."""


def _rehearse(
    origin: Origin, plan: SlicePlan, dst: Path, options: SliceOptions, bar: Bar | None, files: Files
) -> Done:
    _staging(dst, origin, options).check()
    try:
        check_space(dst, plan.target.nbytes)
    except StorageError as error:
        return (f"{error.what}: {error.expected} needed, {error.found}",), None
    return (), None


def _publish(
    origin: Origin, plan: SlicePlan, dst: Path, options: SliceOptions, bar: Bar | None, files: Files
) -> Done:
    target, stop = plan.target, threading.Event()
    payload = sum(part.nbytes for f in target.files for part in f.parts if isinstance(part, Payload))
    with _staging(dst, origin, options) as staging:
        check_space(staging.path, target.nbytes)
        make_files(target.files, staging)
        with bar(payload) if bar else nullcontext(lambda _: None) as tick:
            moved = _move(origin, target, staging, options.workers, tick, stop)
        side = [*target.side_files, *_hub_side(origin)]
        manifest = encode(slice_manifest(origin, plan, moved.hashes))
        write_side_files([*side, SideFile(MANIFEST_NAME, manifest)], staging)
        check_files(target.files, staging)
        _check_unchanged(files)
        staging.commit(last={f.path: f.content for f in target.last if isinstance(f.content, bytes)})
        notes = [f"left as it is, for you to look at: {p}" for p in staging.left_alone]
    notes += [
        f"{p.nonzero_rows} of {p.rows} rows past the vocabulary were not zero, and are left out: {p.name}"
        for p in moved.padding
        if p.nonzero_rows
    ]
    return tuple(notes), moved.fetched


def _check_unchanged(files: Files) -> None:
    """Raise CheckpointError where a file of the source is another one now: the slice may be of two states."""
    for path, before in files.items():
        if stamp(path) != before:
            raise CheckpointError(
                "the source changed while it was sliced",
                where=path,
                fix="run again when nothing writes to it",
            )


def _narrowed(origin: Origin, plan: SlicePlan) -> Origin:
    """The source with no tensors but those of the slice: there may be tens of thousands of others."""
    if origin.to_hf is not None:
        return origin
    wanted = list(dict.fromkeys(kept.source for kept in plan.kept.values()))
    return replace(
        origin,
        tensors={name: origin.tensors[name] for name in wanted},
        hf={name: origin.hf[name] for name in wanted},
        dtypes={name: origin.dtypes[name] for name in wanted},
    )


def _hub_side(origin: Origin) -> Iterator[SideFile]:
    """The small files beside the weights of a repository."""
    if origin.hub is not None:
        done = {*(item.name for item in origin.left_out), *(file.path for file in origin.side_files)}
        for name in origin.hub.side_files:
            if name not in done:
                yield SideFile(name, origin.hub.side_path(name))


class _Moved(NamedTuple):
    """What came of filling the files."""

    padding: list[PaddingFound]
    hashes: dict[str, str]
    """Of every tensor's bytes, as they were written."""
    fetched: int | None
    """Bytes of weights that came from the Hub."""


def _move(
    origin: Origin, target: Target, staging: Staging, workers: int, tick: Progress, stop: threading.Event
) -> _Moved:
    resolver = Resolver(origin, target)
    if origin.hub is not None:
        fetched = fetch(origin.hub, resolver, target.files, staging.path, tick, stop)
        return _Moved([], hash_files(target.files, staging.path, workers), fetched)
    hashes: dict[str, str] = {}

    def written(file: Path, offset: int, part: Payload) -> None:
        hashes[part.name] = hash_tensor(file, offset, part.nbytes)  # while another thread copies

    runner = Runner(origin, resolver, workers=workers, progress=tick, stop=stop, written=written)
    try:
        runner.check_duplicates(origin.duplicates)
        padding = runner.padding(origin.padding)
        runner.write(target.files, staging)
        return _Moved(padding, hashes, None)
    finally:
        runner.close()
