"""A Unix socket between two ends that know each other: frames, descriptors, and a deadline on every wait.

Before the first frame both prove that they hold the key, by messages of fixed size in which there is
nothing to parse; the keys of the two directions follow from what both made up. Whatever is wrong on the
way closes the connection: there is no going on after a frame that was not understood.
"""

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress

from convtools.refit.errors import FrameError, PeerError
from convtools.refit.framing import HEADER_NBYTES, Framing

_HELLO = b"convtools refit/1\n"
_NONCE = 32
_MAC = 32
_CREDENTIALS = struct.Struct("3i")
MAX_FDS = 1


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end, as the kernel says."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


class Connection:
    """Messages as bytes, one after another, from a peer that holds the key."""

    def __init__(self, sock: socket.socket, sending: Framing, receiving: Framing) -> None:
        self._sock, self._sending, self._receiving = sock, sending, receiving
        self._fds: list[int] = []

    @property
    def sock(self) -> socket.socket:
        """For waiting on it."""
        return self._sock

    def send(self, payload: bytes, timeout: float, fd: int | None = None) -> None:
        """Send one frame, and with its first bytes a descriptor. Raises PeerError, FrameError."""
        self._write(self._sending.frame(payload), time.monotonic() + timeout, [] if fd is None else [fd])

    def _write(self, frame: bytes, until: float, fds: list[int]) -> None:
        data = memoryview(frame)
        while data:
            _wait(self._sock, select.POLLOUT, until)
            try:
                n = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerError(f"the peer has gone: {error.strerror}") from None
            data, fds = data[n:], []

    def receive(self, timeout: float, most: int) -> bytes:
        """The next frame's payload, of at most `most` bytes. Raises PeerError, FrameError."""
        until = time.monotonic() + timeout
        head = self._receiving.head(bytes(self._exactly(HEADER_NBYTES, until)), most)
        payload = bytes(self._exactly(head.length, until))
        self._receiving.check(head, payload)
        return payload

    def ready(self, timeout: float) -> bool:
        """Whether something arrives within `timeout`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    def take_fd(self) -> int | None:
        """The descriptor that came with the last frame; it is the caller's to close."""
        return self._fds.pop() if self._fds else None

    def finish(self) -> None:
        """Say that nothing more comes; the peer answers by closing, once it has let go of everything."""
        with suppress(OSError):  # it has gone already
            self._sock.shutdown(socket.SHUT_WR)

    def ended(self, timeout: float) -> bool:
        """Whether the peer has closed within `timeout`, after which this end is closed too."""
        until = time.monotonic() + timeout
        while self.ready(until - time.monotonic()):
            try:
                said, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, MAX_FDS)
                self._fds += fds
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            if not said:
                self.close()
                return True
            if time.monotonic() > until:  # a peer that never stops talking
                break
        return False

    def close(self) -> None:
        """Close the socket, and every descriptor that nobody took."""
        while self._fds:
            os.close(self._fds.pop())
        self._sock.close()

    def _exactly(self, nbytes: int, until: float) -> bytearray:
        # Grown as bytes arrive: a length alone allocates nothing.
        out = bytearray()
        while len(out) < nbytes:
            _wait(self._sock, select.POLLIN, until)
            try:
                data, fds, flags, _ = socket.recv_fds(self._sock, min(nbytes - len(out), 1 << 20), MAX_FDS)
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerError(f"the peer has gone: {error.strerror}") from None
            self._fds += fds
            if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
                raise FrameError("more descriptors were passed than are taken")
            if not data:
                raise PeerError("the peer has gone")
            out += data
        return out


def accept_peer(sock: socket.socket, key: bytes, timeout: float, uid: int | None = None) -> Connection:
    """The listening end's part of the challenge. Raises PeerError."""
    until = time.monotonic() + timeout
    sock.setblocking(False)
    _check_uid(sock, uid)
    mine = secrets.token_bytes(_NONCE)
    _send_raw(sock, _HELLO + mine, until)
    answer = _receive_raw(sock, _NONCE + _MAC, until)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(_proof(key, b"dial", mine, theirs), proof):
        raise PeerError("the peer does not hold the key")
    _send_raw(sock, _proof(key, b"listen", mine, theirs), until)
    return _keyed(sock, key, mine, theirs, dialled=False)


def dial_peer(sock: socket.socket, key: bytes, timeout: float, uid: int | None = None) -> Connection:
    """The connecting end's part. Raises PeerError."""
    until = time.monotonic() + timeout
    sock.setblocking(False)
    _check_uid(sock, uid)
    hello = _receive_raw(sock, len(_HELLO) + _NONCE, until)
    if hello[: len(_HELLO)] != _HELLO:
        raise PeerError("the peer speaks something else", found=hello[: len(_HELLO)])
    theirs, mine = hello[len(_HELLO) :], secrets.token_bytes(_NONCE)
    _send_raw(sock, mine + _proof(key, b"dial", theirs, mine), until)
    if not hmac.compare_digest(_proof(key, b"listen", theirs, mine), _receive_raw(sock, _MAC, until)):
        raise PeerError("the peer does not hold the key")
    return _keyed(sock, key, theirs, mine, dialled=True)


def _keyed(sock: socket.socket, key: bytes, listener: bytes, dialler: bytes, *, dialled: bool) -> Connection:
    up = Framing(_proof(key, b"questions", listener, dialler))
    down = Framing(_proof(key, b"answers", listener, dialler))
    return Connection(sock, up, down) if dialled else Connection(sock, down, up)


def _proof(key: bytes, role: bytes, listener: bytes, dialler: bytes) -> bytes:
    return hmac.new(key, _HELLO + role + b"\0" + listener + dialler, hashlib.sha256).digest()


def _check_uid(sock: socket.socket, uid: int | None) -> None:
    wanted, found = os.geteuid() if uid is None else uid, peer_uid(sock)
    if found != wanted:
        raise PeerError("the peer is another user's process", expected=f"uid {wanted}", found=f"uid {found}")


def _wait(sock: socket.socket, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(sock, event)
    left = until - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise PeerError(
            "the peer did not answer in time",
            fix="it hangs, is stopped, or needs more time: raise the timeout",
        )


def _send_raw(sock: socket.socket, data: bytes, until: float) -> None:
    view = memoryview(data)
    while view:
        _wait(sock, select.POLLOUT, until)
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerError(f"the peer has gone: {error.strerror}") from None


def _receive_raw(sock: socket.socket, nbytes: int, until: float) -> bytes:
    out = b""
    while len(out) < nbytes:
        _wait(sock, select.POLLIN, until)
        try:
            data = sock.recv(nbytes - len(out))
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerError(f"the peer has gone: {error.strerror}") from None
        if not data:
            raise PeerError("the peer has gone, or refused: see that both have the same key")
        out += data
    return out
