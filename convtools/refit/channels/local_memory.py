"""Refit between processes of one machine: questions over a Unix socket, bytes through sealed memory.

The socket and its key lie in a directory of one user (0700, the key 0600). The engine listens; each
trainer that connects proves that it holds the key, and passes the descriptor of its ring once.
"""

import fcntl
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from convtools.refit.bucket import RingView
from convtools.refit.channels.connection import Connection, accept_peer, dial_peer
from convtools.refit.device.memory import DeviceMemory, memory_of
from convtools.refit.device.ring import DeviceView, open_view
from convtools.refit.errors import FrameError, PeerError, RefitError
from convtools.refit.framing import MAX_FRAME
from convtools.refit.protocol import Agree, decode_question, encode
from convtools.refit.receiver import Receiver

SOCKET, KEY = "refit.sock", "refit.key"
MAX_CONNECTIONS = 8
_TICK = 0.05


def private_directory(path: Path) -> Path:
    """The directory, made if need be. Raises PeerError unless it is ours alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PeerError(
            "the directory of a refit socket must be one user's",
            where=path,
            expected=f"a directory of uid {os.geteuid()}, mode 0700",
            found=f"uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}",
        )
    return path


def make_key(directory: Path) -> bytes:
    """A new key in a file that only we can read."""
    path = directory / KEY
    path.unlink(missing_ok=True)
    key = secrets.token_bytes(32)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key)
    return key


def read_key(directory: Path) -> bytes:
    """The key of the engine that listens there. Raises PeerError unless its file is ours alone."""
    path = directory / KEY
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PeerError(
            f"no key of an engine: {error.strerror}", where=path, fix="is the engine up, and is it yours?"
        ) from None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PeerError("the key must be readable by one user only", where=path, fix=f"chmod 600 {path}")
        key = file.read(65)
    if len(key) != 32:
        raise PeerError("the key is damaged", where=path, expected="32 bytes", found=len(key))
    return key


def dial(directory: str | os.PathLike[str], timeout: float) -> Connection:
    """Connect to the engine that listens in `directory`. Raises PeerError."""
    where = Path(directory)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        key = read_key(where)
        sock.settimeout(timeout)
        try:
            _at(where, sock.connect)
        except OSError as error:
            raise PeerError(
                f"no engine listens: {error.strerror or error}", where=where / SOCKET,
                fix="it was killed, or has ended: start it again, and give the directory that it names",
            ) from None  # fmt: skip
        return dial_peer(sock, key, timeout)
    except BaseException:
        sock.close()
        raise


def _at(directory: Path, call: Callable[[str], object]) -> None:
    # A socket's path has room for 107 bytes: the directory is named by a descriptor instead.
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{fd}/{SOCKET}")
    finally:
        os.close(fd)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time. Raises PeerError where another takes long."""
    fd, until = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + 10
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise PeerError("another engine is starting there", where=directory) from None
                time.sleep(_TICK)
        yield
    finally:
        os.close(fd)


class Server:
    """The engine's end: listens in `directory`, and gives what comes to a `Receiver`.

    `frame_timeout` bounds how long a frame that has begun may take.
    """

    def __init__(
        self,
        receiver: Receiver,
        directory: str | os.PathLike[str],
        *,
        frame_timeout: float = 10.0,
        device: Any = None,
    ) -> None:
        """`device`: where buckets may lie too, such as `cuda:0`.

        Raises PeerError where the directory is not ours alone, or another engine listens there, and
        UsageError where there is no such device.
        """
        self._receiver, self._frame_timeout = receiver, frame_timeout
        self.device: DeviceMemory | None = None if device is None else memory_of(device)
        """Memory that trainers may pass."""
        self._stop = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._directory = private_directory(Path(directory))
            with _alone(self._directory):  # of two that start together, the second finds the first
                self._clear()
                self._key = make_key(self._directory)
                _at(self._directory, self._sock.bind)
                self._inode = (self._directory / SOCKET).stat().st_ino
                self._sock.listen(MAX_CONNECTIONS)
            self._sock.settimeout(_TICK)
        except OSError as error:
            self._sock.close()
            raise PeerError(f"no engine can listen there: {error.strerror}", where=directory) from None
        except BaseException:
            self._sock.close()
            raise
        self._accepting = threading.Thread(target=self._accept, name="refit-accept", daemon=True)
        self._accepting.start()

    def _clear(self) -> None:
        """Take away the socket of an engine that has died."""
        path = self._directory / SOCKET
        if not os.path.lexists(path):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                _at(self._directory, probe.connect)
                alive = bool(probe.recv(1))  # one that is just dying accepts, and says nothing
            except (TimeoutError, BlockingIOError):  # it is slow, or has many waiting
                alive = True
            except OSError:
                alive = False
        if not alive:
            path.unlink(missing_ok=True)
            return
        raise PeerError("another engine listens there", where=path)

    def _accept(self) -> None:
        while not self._stop.is_set():
            self._receiver.expire()
            self._threads = {t for t in self._threads if t.is_alive()}
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._stop.is_set():
                    return
                time.sleep(_TICK)  # no descriptors left, say: it may pass
                continue
            if len(self._threads) >= MAX_CONNECTIONS:
                with sock, suppress(OSError):
                    sock.setblocking(False)
                    sock.send(b"busy")
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="refit-peer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no threads left: others can be heard again later
                sock.close()
                continue
            self._threads.add(thread)

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection = accept_peer(sock, self._key, self._frame_timeout)
        except (PeerError, OSError):
            sock.close()
            return
        serve(connection, self._receiver, self._stop, self._frame_timeout, self.device)

    def close(self) -> None:
        """Stop listening; end every connection and so every transaction; remove socket and key."""
        self._stop.set()
        self._accepting.join()
        self._sock.close()
        for thread in self._threads:
            thread.join(self._frame_timeout + 1)
        path = self._directory / SOCKET
        if path.exists() and path.stat().st_ino == self._inode:
            path.unlink()
            (self._directory / KEY).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    connection: Connection,
    receiver: Receiver,
    stop: threading.Event,
    frame_timeout: float,
    device: DeviceMemory | None = None,
) -> None:
    """Answer one peer until it goes, misbehaves or `stop` is set; closes the connection."""
    owner = object()
    ring: RingView | DeviceView | None = None
    try:
        while not stop.is_set():
            if not connection.ready(_TICK):
                receiver.expire()
                continue
            # Only the list of tensors, and a bucket of many small ones, are long.
            message = decode_question(connection.receive(frame_timeout, MAX_FRAME))
            fd = connection.take_fd()
            if isinstance(message, Agree):
                if fd is None and message.device is None:
                    raise FrameError("no ring came with the plan")
                if ring is not None:
                    receiver.lost(owner)  # its buckets lie in the old one
                    ring.close()
                    ring = None
                try:
                    ring = _view(message, fd, device)
                except RefitError as error:
                    connection.send(encode(receiver.refusal(str(error))), frame_timeout)
                    raise
            elif fd is not None:
                os.close(fd)
                raise FrameError("a descriptor came with a question that takes none")
            answer = receiver.handle(message, owner, ring)
            connection.send(encode(answer), frame_timeout)
            del message
    except (RefitError, OSError):  # whatever it was, the transaction of this peer is over
        pass
    finally:
        receiver.lost(owner)
        if ring is not None:
            ring.close()
        connection.close()


def _view(message: Agree, fd: int | None, device: DeviceMemory | None) -> RingView | DeviceView:
    """The trainer's ring, opened; takes `fd`. Raises RefitError."""
    if message.device is not None:
        return open_view(message, message.device, fd, device)
    assert fd is not None
    return RingView(fd, message.bucket_bytes, message.slots)


__all__ = ["Server", "dial", "make_key", "private_directory", "read_key", "serve"]
