"""A directory as a sink: the same transaction, into files beside it; the commit is a rename.

Under the destination lies the old checkpoint whole or the new one whole. What a push brought, and as
which version, is written beside the weights.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convtools.conversion.options import Options
from convtools.disk import identity
from convtools.errors import UsageError, tick
from convtools.refit.errors import RefitError
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sinks.side_files import NOTE
from convtools.staging import Staging, check_space
from convtools.stores.hf import HFCheckpoint, is_hf, open_hf
from convtools.stores.hf_write import INDEX_NAME, HFPlan, plan_hf
from convtools.stores.move import write_all

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]


class CheckpointApplier:
    """Writes each run of bytes to its place in safetensors files that are not published yet."""

    mode = "shadow"

    def __init__(
        self,
        dst: Path,
        files: Mapping[str, bytes],
        *,
        max_shard_size: int = 5_000_000_000,
        fsync: bool = True,
    ) -> None:
        """`files`: config.json and what else belongs beside the weights, by name. Raises UsageError."""
        if "config.json" not in files:
            raise UsageError("a checkpoint needs a config.json", fix="give its content in `files`")
        self._dst, self._files, self._max, self._fsync = dst, dict(files), max_shard_size, fsync
        self._aside = dst  # what is written becomes this
        self._layout: HFPlan | None = None
        self._digest = ""
        self._places: dict[str, tuple[str, int]] = {}
        self._fds: dict[str, int] = {}
        self._open = ExitStack()
        self._staging: Staging | None = None
        self._seen = _note_in(dst)
        self._out_there = False
        """Whether a commit failed after its rename."""
        self._opened: tuple[object, HFCheckpoint] | None = None

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Whatever can be written: a directory has no tensors of its own."""
        plan_hf([(t.name, t.dtype, t.shape) for t in tensors], self._max)

    def undo_bytes(self) -> int:
        """No memory: the copy is on disk."""
        return 0

    def in_place(self) -> bool:
        """It writes aside."""
        return False

    def begin(self, plan: RefitPlan) -> None:
        """Make the files, with headers and holes. Raises StorageError, also where there is no room."""
        self._layout = plan_hf([(t.name, t.dtype, t.shape) for t in plan.tensors], self._max)
        self._digest = plan.digest.hex()
        check_space(self._dst, sum(f.nbytes for f in self._layout.files))
        staging = Staging(self._aside, overwrite=True, replaceable=_refusal, fsync=self._fsync)
        self._staging = self._open.enter_context(staging)
        if (note := _note_in(self._dst)) is not None and note != self._seen:
            raise RefitError(
                "another push wrote the directory meanwhile", where=self._dst,
                found=f"version {version_of(self._dst)}", fix="make the sink anew",
            )  # fmt: skip
        for file in self._layout.files:
            path = staging.file(file.path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._open.callback(os.close, fd)
            self._fds[file.path] = fd
            os.ftruncate(fd, file.nbytes)
            at = 0
            for part in file.parts:
                if isinstance(part, bytes):
                    write_all(fd, part, at)
                    at += len(part)
                else:
                    self._places[part.name] = (file.path, at)
                    at += part.nbytes

    def write(self, tensor: Tensor, start: int, data: "Bytes") -> "Bytes":
        """To its place in its file; gives what was written back from there."""
        import numpy as np

        from convtools.equality.reading import read_into

        path, at = self._places[tensor.name]
        write_all(self._fds[path], data.data, at + start)
        back = np.empty(len(data), "u1")
        read_into(Path(path), self._fds[path], at + start, back.data)
        return back

    def prepare(self) -> None:
        """Everything to disk, so that the commit has little left to fail of. Raises StorageError."""
        assert self._staging is not None
        for name, content in self._files.items():
            with self._staging.open(name) as file:
                file.write(content)
        self._staging.flush()

    def swap(self, version: int) -> None:
        """Publish: the note and the index last, one rename."""
        assert self._staging is not None and self._layout is not None
        index = {INDEX_NAME: self._layout.index} if self._layout.index else {}
        self._publish(self._staging, {NOTE: self._note(version)} | index)
        self._leave()

    def _publish(self, staging: Staging, last: Mapping[str, bytes]) -> None:
        was = identity(self._dst)
        try:
            staging.commit(last)
        except BaseException:
            self._out_there = identity(self._dst) != was
            raise
        finally:
            self._seen = _note_in(self._dst)

    def _note(self, version: int) -> bytes:
        return json.dumps({"version": version, "plan": self._digest}).encode() + b"\n"

    def finish(self) -> None:
        """It is published."""

    def abort(self) -> bool:
        """Remove what was written. False where it was published all the same, and may not last."""
        self._leave()
        published, self._out_there = self._out_there, False
        return not published

    def _leave(self) -> None:
        self._fds, self._places, self._staging = {}, {}, None
        self._open.close()

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """The published bytes."""
        import numpy as np

        from convtools.equality.reading import read_into

        found = self._published_headers().tensors.get(tensor.name)
        if found is None:
            raise RefitError(f"{tick(tensor.name)} is not in the checkpoint", where=self._dst)
        out = np.empty(tensor.nbytes, "u1")
        blob = found.blobs[0]
        with blob.path.open("rb") as file:
            read_into(blob.path, file.fileno(), blob.offset, out.data)
        return out

    def _published_headers(self) -> HFCheckpoint:
        """Read again when a file has changed, not for every tensor."""
        now: list[object] = []
        if self._dst.is_dir():
            with os.scandir(self._dst) as files:
                stats = [(file.name, file.stat()) for file in files]
            now += sorted((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in stats)
        if self._opened is None or self._opened[0] != now:
            self._opened = (now, open_hf(self._dst))
        return self._opened[1]

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """What lies in the files that are not published yet."""
        import numpy as np

        from convtools.equality.reading import read_into

        if tensor.name not in self._places:
            return None
        path, at = self._places[tensor.name]
        out = np.empty(tensor.nbytes, "u1")
        read_into(Path(path), self._fds[path], at, out.data)
        return out


def version_of(dst: Path) -> int:
    """The version that a directory was written as; 0 where none is there."""
    try:
        return max(0, int(json.loads(_note_in(dst) or b"")["version"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def _note_in(dst: Path) -> bytes | None:
    """What a push wrote beside the weights."""
    try:
        with (dst / NOTE).open("rb") as file:
            return file.read(1 << 16)
    except OSError:
        return None


def _refusal(dst: Path) -> str | None:
    return None if is_hf(dst) and (dst / NOTE).is_file() else "it was not written by a push"


class CheckpointSink(DirectSink):
    """A directory that each push replaces: Hugging Face, or, with `options`, one of Megatron's formats."""

    caches = False
    """Nobody answers from it."""

    def __init__(
        self,
        dst: str | os.PathLike[str],
        files: Mapping[str, bytes],
        *,
        options: Options | None = None,
        name: str | None = None,
        max_shard_size: int = 5_000_000_000,
        fsync: bool = True,
    ) -> None:
        """`files` as for `CheckpointApplier`; `options` as for `convtools.convert`. Raises UsageError."""
        self.written = where = Path(dst)
        """The directory."""
        applier: CheckpointApplier
        if options is None or options.to == "hf":
            applier = CheckpointApplier(where, files, max_shard_size=max_shard_size, fsync=fsync)
        else:
            from convtools.refit.sinks.megatron import MegatronApplier

            applier = MegatronApplier(where, files, options, fsync=fsync)
        super().__init__(Receiver(applier, version=version_of(where)), name or os.fspath(dst))
