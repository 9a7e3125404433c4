"""The file channel: a checkpoint directory that an engine loads again, by the same transaction.

Written aside and brought to disk by Prepare, renamed at Commit; then the engine is told to load it, and
asked what it serves. Where that fails, the old directory comes back and the engine is told to load that:
what cannot be undone so leaves the sink poisoned until a push succeeds.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from convtools.disk import exchange, writing
from convtools.equality.fingerprint import Fingerprint
from convtools.errors import ConvtoolsError, capped, tick
from convtools.refit.errors import RefitError
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.checkpoint import CheckpointApplier, _note_in, _refusal, version_of
from convtools.refit.sinks.side_files import NOTE
from convtools.refit.transaction import packed
from convtools.staging import Staging

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

Load = Callable[[Path, int], None]
"""Makes an engine serve the checkpoint in a directory, as a version; raises where it does not."""


class Loader(Protocol):
    """An engine that loads a directory when it is told to."""

    def load(self, directory: Path, version: int) -> None:
        """Serve it; caches are emptied. Raises ConvtoolsError where that failed."""

    def version(self) -> int | None:
        """What it serves now; None where it cannot say."""

    def fingerprints(self, tensors: Sequence[Tensor]) -> Sequence[bytes] | None:
        """Of what it serves now; None where it cannot say."""


class _Called:
    """A function in the place of a `Loader`."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def version(self) -> int | None:
        return None

    def fingerprints(self, tensors: Sequence[Tensor]) -> Sequence[bytes] | None:
        return None


class ReloadApplier(CheckpointApplier):
    """Writes as `CheckpointApplier` does; the commit is over when the engine serves the new directory."""

    def __init__(
        self, dst: Path, files: Mapping[str, bytes], engine: Loader, *, max_shard_size: int, fsync: bool
    ) -> None:
        if dst.is_dir():
            dst = Path(os.path.realpath(dst))  # what is put back is the directory, not a symlink to it
        super().__init__(dst, files, max_shard_size=max_shard_size, fsync=fsync)
        self._engine = engine
        self._before = dst.with_name(f".{dst.name}.before")
        self._claim = ExitStack()
        self._plan: RefitPlan | None = None
        self._published = self._claimed = self._kept = False
        self._checked = False
        """Whether the engine could tell of its own bytes after the last load."""
        self._version: int | None = None

    def begin(self, plan: RefitPlan) -> None:
        """As ever; what a killed push has left is settled first: the directory is what the engine serves."""
        self._published, self._plan = False, plan
        # Until the engine has loaded, nobody else may exchange the directory, or take away the old one.
        self._claim.enter_context(
            Staging(self._before, overwrite=True, replaceable=self._foreign, fsync=False)
        )
        self._claimed = True
        self._version = self._engine.version()
        stale = self._version not in (None, version_of(self._dst))
        if stale and self._before.is_dir() and version_of(self._before) == self._version:
            self._put_back()  # it was renamed, and never loaded
            self._seen = _note_in(self._dst)
        shutil.rmtree(self._before, ignore_errors=True)
        super().begin(plan)

    def prepare(self) -> None:
        """Everything to disk, and a second name for every file of the old directory."""
        super().prepare()
        if self._dst.is_dir() and os.listdir(self._dst):
            if self._version is None:
                self._version = version_of(self._dst)
            with writing(self._dst.parent):
                shutil.copytree(self._dst, self._before, copy_function=os.link, symlinks=True)
            self._kept = True

    def swap(self, version: int) -> None:
        """Publish, have it loaded, and ask. Raises what the engine raises, RefitError where it is another."""
        assert self._plan is not None
        super().swap(version)
        self._published = True
        self._engine.load(self._dst, version)
        found = self._engine.version()
        if found is not None and found != version:
            raise RefitError(
                "the engine loaded the directory and serves another version", expected=version, found=found
            )
        self._checked = self._compare(self._plan.tensors)

    def finish(self) -> None:
        """The old directory goes."""
        self._published = False
        self._release()

    def abort(self) -> bool:
        """Before the rename nothing was touched; after it, the old directory is put back and loaded."""
        whole = super().abort()
        published, self._published = self._published or not whole, False
        try:
            return not published or self._go_back()
        finally:
            self._release()
            self._seen = _note_in(self._dst)

    def _foreign(self, before: Path) -> str | None:
        """Why what lies under the name is not what a push, killed at any moment, has left."""
        known = {NOTE, *self._files, *(os.listdir(self._dst) if self._dst.is_dir() else ())}
        if all(name in known or name.startswith("model") for name in os.listdir(before)):
            return None
        return _refusal(before)

    def _release(self) -> None:
        """Let the next push begin; the old directory goes, if it is ours."""
        if self._claimed:
            shutil.rmtree(self._before, ignore_errors=True)
        self._claimed = self._kept = False
        self._claim.close()

    def _go_back(self) -> bool:
        if not self._kept or self._version is None:
            shutil.rmtree(self._dst, ignore_errors=True)  # there was none before
            return self._version is not None and self._engine.version() == self._version
        if not self._before.is_dir():  # somebody removed it: what lies there now is all there is
            return False
        self._put_back()
        if version_of(self._dst) != self._version:  # not what the engine served: no way back to that
            return False
        with suppress(ConvtoolsError, OSError):
            self._engine.load(self._dst, self._version)
            return self._engine.version() in (None, self._version)
        return False

    def _put_back(self) -> None:
        """The old directory under its name again."""
        if not self._dst.exists():
            os.rename(self._before, self._dst)
        elif not exchange(self._before, self._dst):
            gone = self._before.with_name(f"{self._before.name}.gone")
            os.rename(self._dst, gone)
            os.rename(self._before, self._dst)
            shutil.rmtree(gone, ignore_errors=True)

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """The engine's own bytes are out of reach: what it told of them was compared after the load."""
        return None

    def weaker(self, tensor: Tensor) -> str:
        """By what means it is known what the engine serves."""
        if self._checked:
            return "the engine loads files; its own fingerprint was compared when it had loaded them"
        return "the engine loads files, and cannot tell what it holds: compared are the bytes in the files"

    def _compare(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the engine's fingerprints are those of the files; False: it has none. Raises RefitError."""
        told = self._engine.fingerprints(tensors)
        if told is None:
            return False
        if len(told) != len(tensors):
            raise RefitError("the engine told of other tensors", expected=len(tensors), found=len(told))
        differ = []
        for tensor, value in zip(tensors, told, strict=True):
            lies = super().serves(tensor)
            assert lies is not None
            made = Fingerprint()
            made.add(0, lies.data)
            if packed(made) != value:
                differ.append(tick(tensor.name))
        if differ:
            raise RefitError("the engine loaded the directory and serves other weights", found=capped(differ))
        return True


class ReloadSink(DirectSink):
    """A Hugging Face directory that an engine loads after every push."""

    caches = False
    """None to be told of: loading empties them."""

    def __init__(
        self,
        dst: str | os.PathLike[str],
        files: Mapping[str, bytes],
        engine: Loader | Load,
        *,
        name: str | None = None,
        max_shard_size: int = 5_000_000_000,
        fsync: bool = True,
    ) -> None:
        """`files` as for `CheckpointSink`; `engine`: a `Loader`, or a call with directory and version."""
        self.written = where = Path(dst)
        """The directory."""
        loader: Loader = engine if hasattr(engine, "load") else _Called(engine)  # type: ignore[assignment]
        self.loader = loader
        """How the engine is told."""
        applier = ReloadApplier(where, files, loader, max_shard_size=max_shard_size, fsync=fsync)
        at = loader.version()
        super().__init__(
            Receiver(applier, version=version_of(where) if at is None else at), name or os.fspath(dst)
        )
