"""`convert`: open, plan, account, write aside, publish."""

import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from convtools.conversion.dtypes import recast_config, wanted_dtypes
from convtools.conversion.exactness import check_shifts
from convtools.conversion.from_hf import hf_source
from convtools.conversion.from_torch import torch_source
from convtools.conversion.from_torch_dist import torch_dist_source
from convtools.conversion.megatron_target import MegatronChoices
from convtools.conversion.options import Options
from convtools.conversion.plan import Resolver, Target, verify
from convtools.conversion.report import Report, report
from convtools.conversion.run import (
    PaddingFound,
    Progress,
    Runner,
    check_files,
    file_shares,
    make_files,
    write_side_files,
)
from convtools.conversion.source import Source
from convtools.conversion.target_layout import target_layout
from convtools.conversion.to_hf import hf_target
from convtools.conversion.to_torch import torch_target
from convtools.conversion.to_torch_dist import torch_dist_target
from convtools.conversion.world import World, joined_world
from convtools.disk import check_space
from convtools.errors import StorageError, UsageError, capped
from convtools.staging import Joined, Staging, join
from convtools.stores.base import FilePlan
from convtools.stores.hf import is_hf
from convtools.stores.megatron_dir import find_iteration, is_megatron, iterations

PathLike = str | os.PathLike[str]
Bar = Callable[[int], AbstractContextManager[Progress]]
"""Given the bytes to come, a context that is called with the bytes that were moved."""


def open_source(
    path: PathLike, *, iteration: int | str | None = None, hf_config: PathLike | None = None
) -> Source:
    """Open a checkpoint of any supported format; reads metadata only.

    Raises CheckpointError, UnsafePickle, UnsupportedEncoding, ConfigError, AccountingError.
    """
    root = Path(path)
    if not root.is_dir():
        raise UsageError(
            f"`{root}` is not a directory",
            expected="a checkpoint's folder",
            fix="only slice and compare read from the Hub: download it first (`hf download`)"
            if not root.exists() and str(path).count("/") == 1
            else None,
        )
    if is_hf(root) or not is_megatron(root):
        return hf_source(root)  # whose errors say what a checkpoint's folder looks like
    where = find_iteration(root, iteration)
    opener = torch_dist_source if where.format == "torch_dist" else torch_source
    return opener(where, root, None if hf_config is None else Path(hf_config))


def convert(
    src: PathLike, dst: PathLike, options: Options, bar: Bar | None = None, *, alone: bool = False
) -> Report:
    """Convert checkpoint `src` into a new checkpoint `dst`, which appears whole or not at all.

    Under torchrun, all ranks call it and share the work, unless one does it `alone`. Every error is a
    ConvtoolsError, and whatever happens `src` is left as it is.
    """
    began = time.monotonic()
    if not isinstance(options, Options):
        raise UsageError("convert takes convtools.Options", found=type(options).__name__)
    options.check()
    with nullcontext(World()) if alone else joined_world() as world:
        with _collector_at_rest():
            source = open_source(src, iteration=options.iteration, hf_config=options.hf_config)
            _check_use(source, options)
            dtypes, casts = wanted_dtypes(source, options)
            source = recast_config(source, options)
            target = plan_target(source, options, dtypes)
            totals = verify(source, target)
            shifts = check_shifts(source, target, allow_inexact=options.allow_inexact)
        run = _Run(options, source, target, world, bar)
        seen = (_rehearse if options.dry_run else _publish)(Path(src), Path(dst), run)
        seconds = time.monotonic() - began
        return report(
            source, target, options, Path(dst), totals, casts, shifts, seen.padding, seen.notes, seconds
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that one rank's work needs."""

    options: Options
    source: Source
    target: Target
    world: World
    bar: Bar | None

    @property
    def share(self) -> list[FilePlan]:
        """The files that this rank fills."""
        return file_shares(self.target, self.world.size)[self.world.rank]


class _Seen(NamedTuple):
    """What was noticed on the way."""

    padding: tuple[PaddingFound, ...] = ()
    notes: tuple[str, ...] = ()


def _check_use(source: Source, options: Options) -> None:
    """Raise UsageError for a choice that this source has no use for."""
    if source.format == "hf" and options.hf_config is not None:
        raise UsageError(
            "--hf-config is for a Megatron source", fix="leave it out: the source has its config.json"
        )
    if source.format == "hf" and options.to == "hf" and options.iteration is not None:
        raise UsageError("--iteration means nothing between HF checkpoints", fix="leave it out")


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A plan is a million small values without cycles: looking for some takes longer than making them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _rehearse(src: Path, dst: Path, run: _Run) -> _Seen:
    """All that can be known without writing: whether `dst` may be written and has room, and the padding."""
    _staging(dst, src, run).check()
    notes: tuple[str, ...] = ()
    try:
        check_space(dst, run.target.nbytes)
    except StorageError as error:
        notes = (f"{error.what}: {error.expected} needed, {error.found}",)
    workers, stop = run.options.workers, run.world.stop
    runner = Runner(run.source, None, workers=workers, progress=lambda _: None, stop=stop)
    try:
        return _Seen(tuple(runner.padding(run.source.padding)), notes)
    finally:
        runner.close()


def _agree(run: _Run) -> None:
    """Raise StorageError unless every rank has made the same plan."""
    plan = repr([(f.path, f.nbytes) for f in run.target.files]).encode()
    digests = run.world.gather("plan", hashlib.sha256(plan).hexdigest())
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise StorageError(
            f"ranks {capped(other)} have made another plan than rank 0",
            fix="all ranks must see the same source, options and convtools",
        )


def _publish(src: Path, dst: Path, run: _Run) -> _Seen:
    options, target, world = run.options, run.target, run.world
    _agree(run)
    if world.rank:
        path, token = world.share("staging")
        joined = join(path, token, fsync=options.fsync)
        for file in run.share:
            joined.file(file.path)  # it is this rank that brings the file to disk
        return _Seen(_work(joined, run))
    with _staging(dst, src, run) as staging:
        check_space(staging.path, target.nbytes)
        make_files(target.files, staging)
        world.share("staging", [str(staging.path), staging.token])
        padding = _work(staging, run)
        write_side_files(target.side_files, staging)
        world.raise_fault()
        check_files(target.files, staging)
        staging.commit(last={f.path: f.content for f in target.last if isinstance(f.content, bytes)})
        return _Seen(padding, tuple(f"left as it is, for you to look at: {p}" for p in staging.left_alone))


def _work(staging: Joined, run: _Run) -> tuple[PaddingFound, ...]:
    """One rank's share; returns what every rank saw of the padding, when all have reported."""
    source, world, share = run.source, run.world, run.share
    nbytes = sum(f.nbytes for f in share)
    with run.bar(nbytes) if run.bar and not world.rank else nullcontext(lambda _: None) as tick:
        resolver = Resolver(source, run.target)
        runner = Runner(source, resolver, workers=run.options.workers, progress=tick, stop=world.stop)
        try:
            runner.check_duplicates(source.duplicates[world.rank :: world.size])
            padding = runner.padding(source.padding[world.rank :: world.size])
            runner.write(share, staging)
        except BaseException as error:
            world.raise_fault()  # the reason, where this rank only stopped because another did
            world.fail(error)  # before what the others write to is taken away
            raise
        finally:
            runner.close()
    if world.rank:
        staging.flush()
    reports = world.gather("wrote", [list(p) for p in padding])
    return tuple(PaddingFound(*p) for ranks in reports for p in ranks)


def _replaceable(target: Target) -> Callable[[Path], str | None]:
    """Says why a folder may not be replaced; None for a checkpoint whose iterations are all written anew."""

    def reason(path: Path) -> str | None:
        if not is_hf(path) and not is_megatron(path):
            return "it does not look like a checkpoint"
        written = {file.path.split("/")[0] for file in target.files}
        others = [name for name in iterations(path) if name not in written]
        return f"it holds other iterations, which would be lost: {capped(others)}" if others else None

    return reason


def _staging(dst: Path, src: Path, run: _Run) -> Staging:
    options = run.options
    allowed = _replaceable(run.target)
    return Staging(dst, src=[src], overwrite=options.overwrite, replaceable=allowed, fsync=options.fsync)


def plan_target(source: Source, options: Options, dtypes: dict[str, str]) -> Target:
    """Plan the target that the options ask for. Raises ParallelError, AccountingError, UsageError."""
    if options.to == "hf":
        return hf_target(source, dtypes, max_shard_size=options.shard_nbytes)
    choices = MegatronChoices(
        layout=target_layout(source, options),
        split=options.split(),
        divisible_by=options.make_vocab_size_divisible_by,
        padded_vocab=options.padded_vocab_size,
        iteration=_iteration(source, options),
        mcore=options.mcore(),
        grouped_experts=options.expert_layout == "grouped",
    )
    if options.to == "torch":
        return torch_target(source, dtypes, choices)
    return torch_dist_target(source, dtypes, choices, max_shard_size=options.shard_nbytes)


def _iteration(source: Source, options: Options) -> int | str:
    found = source.iteration if source.iteration is not None else options.iteration
    return 1 if found is None else found
