"""Atomic publication of an output directory: under `dst` lies the old whole or the new whole, never a part.

Files are written into a directory beside `dst` (`partial.py`) that becomes `dst` in one rename. A run
that was killed leaves that directory behind: the next run for the same `dst` takes it away if its
writer is dead, refuses to start if it lives, and tells of it if another host made it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO, Self

from convtools import partial
from convtools.disk import above, check_space, exchange, identity, sync, sync_tree, writing
from convtools.errors import StorageError, capped

__all__ = ["Joined", "Staging", "check_space", "join", "writing"]

_PATIENCE = 3.0
"""Seconds to wait for processes that are just beginning, or just ending."""


class Joined:
    """A staging directory as each of its writers sees it; the files go under `path`."""

    def __init__(self, path: Path, *, fsync: bool = True) -> None:
        self.path = path
        self._fsync = fsync
        self._mine: list[Path] = []

    def file(self, name: str) -> Path:
        """The path to write `name` at, its parent directories made.

        Raises StorageError if `name` would lie outside, or the directories cannot be made.
        """
        parts = Path(name).parts
        if not parts or ".." in parts or os.path.isabs(name):
            raise StorageError(f"`{name}` does not name a file inside the output directory", where=self.path)
        path = self.path / name
        if not self.path.is_dir():
            raise StorageError(f"`{self.path}` was removed while it was written", fix="run it again")
        with writing(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._mine.append(path)
        return path

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new binary file called `name`. Raises StorageError if it exists or cannot be written."""
        path = self.file(name)
        with writing(path), path.open("xb") as file:
            yield file

    def flush(self) -> None:
        """Bring this writer's files to disk. Raises StorageError.

        Each writer does so before the first one commits: one host cannot do it for another.
        """
        for path in self._mine if self._fsync else ():
            with writing(path):
                sync(path)


def join(path: str | os.PathLike[str], token: str, *, fsync: bool = True) -> Joined:
    """The staging directory of another process, by its `path` and `token`.

    Raises StorageError if it is not there or is another run's.
    """
    partial.check_token(Path(path), token)
    return Joined(Path(path), fsync=fsync)


class Staging(Joined):
    """Write a directory beside `dst`, then publish it whole with `commit()`.

    >>> import tempfile
    >>> dst = Path(tempfile.mkdtemp()) / "out"
    >>> with Staging(dst) as staging:
    ...     with staging.open("a/b.bin") as file:
    ...         n = file.write(b"hello")
    ...     staging.commit()
    >>> (dst / "a/b.bin").read_bytes()
    b'hello'

    Any other way out of the block (an exception, Ctrl-C, SIGTERM, no commit) removes what was written
    and leaves `dst` as it was. `src` is what will be read. With `overwrite`, a filled `dst` is replaced
    unless `replaceable(dst)` returns a reason not to. Raises StorageError before anything is made.
    """

    token: str
    """What `join` asks for."""
    left_alone: tuple[Path, ...]
    """For the user to look at: partial directories of other hosts, or one that could not be removed."""

    def __init__(
        self,
        dst: str | os.PathLike[str],
        *,
        src: Iterable[str | os.PathLike[str]] = (),
        overwrite: bool = False,
        replaceable: Callable[[Path], str | None] | None = None,
        fsync: bool = True,
    ) -> None:
        if overwrite and replaceable is None:
            raise TypeError("overwrite needs replaceable: the caller knows what may be replaced")
        self.dst = _checked(Path(dst), [Path(s) for s in src])
        super().__init__(self.dst, fsync=fsync)
        self.token, self.left_alone = "", ()
        self._replaceable = replaceable if overwrite else None
        self._partial: partial.Partial | None = None
        self._pid = os.getpid()
        self._signals: list[signal.Signals] = []

    def check(self) -> None:
        """Raise StorageError if `dst` may not be written as things stand; makes nothing."""
        self._replaces()

    def __enter__(self) -> Self:
        self._catch_signals()
        try:
            self._claim()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:  # a forked child may unwind through here: the directory is its parent's
            self._close(error)

    def commit(self, last: Mapping[str, bytes] | Collection[str] = ()) -> None:
        """Publish: everything to disk, then the files of `last`, then one rename.

        `last` maps names to contents to write now, or names files that were written before.
        Raises StorageError if `dst` has changed since the start, and then leaves it as it is.
        """
        assert self._partial is not None, "commit is called once, in the with block"
        late = [self.file(name) for name in last]
        with writing(self.dst.parent):
            if self._fsync:
                sync_tree(self.path, leave=late)
            for name, path in zip(last, late, strict=True):
                if isinstance(last, Mapping):
                    path.write_bytes(last[name])
                elif not path.is_file():
                    raise StorageError(f"`{name}`, to be published last, was not written", where=path)
                for p in (path, path.parent) if self._fsync else ():
                    sync(p)
            self._publish(self._partial)
            if self._fsync:
                sync(self.dst.parent)
        self._close()

    def _publish(self, mine: partial.Partial) -> None:
        if identity(self.dst) != self._seen:
            raise StorageError(
                f"`{self.dst}` was made or replaced by another process meanwhile",
                fix="look at what is there now, then run again",
            )
        if not self._replaces():
            os.rename(mine.data, self.dst)  # onto nothing or an empty directory: onto anything else it fails
        elif not exchange(mine.data, self.dst):
            os.rename(self.dst, mine.old)
            try:
                os.rename(mine.data, self.dst)
            finally:
                partial.restore(mine.path, self.dst)

    def _replaces(self) -> bool:
        """Whether `dst` holds something that is to be replaced. Raises StorageError if it may not be."""
        dst = self.dst
        if not dst.exists() or not (names := os.listdir(dst)):
            return False
        if self._replaceable is None:
            raise StorageError(
                f"`{dst}` exists and is not empty",
                found=capped(sorted(names)),
                fix="name another directory, or allow this one to be replaced (--overwrite)",
            )
        refusal = self._replaceable(dst)
        if identity(dst) in above(Path(os.path.expanduser("~"))):
            refusal = "the home directory lies in it"
        elif not os.access(dst, os.W_OK | os.X_OK):
            refusal = "it is write-protected"
        if refusal:
            raise StorageError(f"`{dst}` is not replaced: {refusal}", fix="name another directory")
        return True

    def _claim(self) -> None:
        """Become the one writer of `dst` on this host. Raises StorageError if there is another.

        Of the processes that start together, each first shows itself and then looks for the others, so
        of any two at least one sees the other. The one with the smallest token waits until the others
        have stepped back, then begins; whoever sees that one has begun gives up.
        """
        until = time.monotonic() + _PATIENCE
        with writing(self.dst.parent):
            while True:
                mine, others = self._partial, partial.look_around(self.dst, self._partial)
                if others.writer or time.monotonic() > until:
                    raise StorageError(
                        f"`{self.dst}` is being written by {others.writer or 'another process'}",
                        fix="wait until that has ended, or name another directory",
                    )
                if mine is not None and not others.rivals:
                    break
                if mine is None and not others.rivals:
                    self._replaces()
                    self._partial = partial.create(self.dst, self._fsync)
                    continue
                if mine is not None and min(others.rivals) < mine.token:
                    self._partial = None
                    mine.remove(self.dst)
                time.sleep(0.001 + os.urandom(1)[0] / 20_000)
            mine.begin()
            self._seen = identity(self.dst)
            self._replaces()  # once more: `dst` may have been published since
        self.token, self.path, self.left_alone = mine.token, mine.data, others.foreign

    def _close(self, error: BaseException | None = None) -> None:
        """Remove the partial directory, which after a commit holds what was replaced."""
        self._partial, mine = None, self._partial
        try:
            if mine is not None:
                mine.remove(self.dst)
        except OSError as trouble:
            assert mine is not None
            self.left_alone += (mine.path,)
            if error is not None:
                error.add_note(f"`{mine.path}` could not be removed: {trouble}")
        finally:
            for number in self._signals:
                signal.signal(number, signal.SIG_DFL)
            self._signals = []

    def _catch_signals(self) -> None:
        """Let SIGTERM and SIGHUP unwind the stack, unless the caller has handlers of its own."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _unwind)
                    self._signals.append(number)


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _checked(dst: Path, sources: list[Path]) -> Path:
    """`dst` without symlinks. Raises StorageError where no directory can be published."""
    try:
        if dst.is_symlink() and not dst.exists():
            raise StorageError(f"`{dst}` is a symlink to nothing", found=os.readlink(dst), fix="remove it")
        real = dst.resolve()
        if real.exists():
            if not real.is_dir():
                raise StorageError(f"`{dst}` is not a directory", fix="name a directory")
            if os.path.ismount(real):
                raise StorageError(f"`{dst}` is a mount point", fix="name a directory inside it")
            if identity(real) in above(Path.cwd()):
                raise StorageError(f"the working directory lies in `{dst}`", fix="run from another directory")
        _check_apart(dst, real, [s for s in sources if s.exists()])
        if not real.parent.is_dir():
            raise StorageError(f"`{real.parent}` is not a directory", fix=f"mkdir -p {real.parent}")
        if not os.access(real.parent, os.W_OK | os.X_OK):
            raise StorageError(f"no permission to write in `{real.parent}`", fix="name another directory")
    except OSError as error:
        raise StorageError(f"`{dst}` cannot be written: {error.strerror}", where=error.filename) from error
    return real


def _check_apart(dst: Path, real: Path, sources: list[Path]) -> None:
    for src in sources:
        read, written = identity(src), identity(real)
        if read == written:
            raise StorageError(f"`{dst}` is the source itself", fix="name another directory")
        if read in above(real):
            raise StorageError(f"`{dst}` lies inside the source `{src}`", fix="name another directory")
        if written is not None and written in above(src):
            raise StorageError(f"the source `{src}` lies inside `{dst}`", fix="name another directory")
