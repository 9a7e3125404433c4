"""A peer that lies: wrong user, wrong key, wrong memory, wrong frames. The engine keeps what it had."""

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convtools.errors import UsageError
from convtools.refit.bucket import F_SEAL_FUTURE_WRITE, SEALS, Ring, RingView
from convtools.refit.channels import connection as connections, local_memory
from convtools.refit.channels.connection import Connection, accept_peer, dial_peer
from convtools.refit.channels.local_memory import Server, dial, private_directory, read_key
from convtools.refit.errors import FrameError, PeerError, RefitError
from convtools.refit.framing import MAX_FRAME
from convtools.refit.plan import make_plan
from convtools.refit.protocol import Agreed, Ask, Refused, Told, decode_answer, encode
from convtools.refit.sinks.base import agree
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import described
from tests.refit.engines import Engine, model

FAST = 0.3


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Engine, Path]]:
    """An engine that listens; whatever a test does, it serves a push afterwards, and nothing leaks."""
    before = set(os.listdir("/proc/self/fd"))
    made, where = Engine(), tmp_path / "e"
    with Server(made.receiver, where, frame_timeout=FAST):
        yield made, where
        source = model(5)
        with WeightSync(source, [LocalSink(where)], bucket_bytes=4096, timeout=5) as sync:
            assert sync.push(5).version == 5
        assert made.look() == 5 and not made.mixes
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert os.listdir(where) == []


def ring_of(fd: int, bucket_bytes: int = 4096) -> Any:
    """What a peer passes in place of a ring."""

    class Passed:
        slots, windows = 2, False

    passed = Passed()
    passed.fd = fd
    return passed


def passing(where: Path, fd: int, count: int = 1) -> Any:
    """Agree with this descriptor; the answer."""
    plan = make_plan([described(n, t) for n, t in model(1).items()], 4096)
    connection = dial(where, 2)
    try:
        connection.send(encode(agree(plan, ring_of(fd))), 2, fd=fd)
        return decode_answer(connection.receive(2, MAX_FRAME))
    finally:
        connection.close()


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    "missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_SEAL]
)
def test_memory_that_is_not_sealed(engine: tuple[Engine, Path], missing: int) -> None:
    fd = memfd(8192, SEALS & ~missing)
    answer = passing(engine[1], fd)
    os.close(fd)
    assert isinstance(answer, Refused) and "not sealed" in answer.reason


@pytest.mark.parametrize("size", [0, 8191, 4096, 1 << 20])
def test_memory_of_another_size(engine: tuple[Engine, Path], size: int) -> None:
    fd = memfd(size, SEALS)
    answer = passing(engine[1], fd)
    os.close(fd)
    assert isinstance(answer, Refused) and "another size" in answer.reason


def test_what_is_no_memory(engine: tuple[Engine, Path], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    for fd in (os.open(path, os.O_RDWR), os.open("/dev/zero", os.O_RDWR), os.pipe()[0]):
        answer = passing(engine[1], fd)
        assert isinstance(answer, Refused) and "no memory that can be sealed" in answer.reason
        os.close(fd)
    os.close(fd + 1)


def test_the_ring_cannot_be_shrunk_grown_or_written_by_the_other_end() -> None:
    with Ring(4096, 2) as ring:
        for size in (0, 4096, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(ring.fd, size)
        with pytest.raises(PermissionError):
            os.pwrite(ring.fd, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(ring.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        view = RingView(os.dup(ring.fd), 4096, 2)
        ring.slot(1, 4)[:] = b"abcd"
        seen = view.slot(1, 4)
        assert bytes(seen) == b"abcd" and seen.readonly
        for i, n in ((2, 1), (-1, 1), (0, 4097), (0, -1)):
            with pytest.raises(RefitError, match="outside of the ring"):
                view.slot(i, n)
        seen.release()
        view.close()
    for sizes in ((4096, 1), (4000, 2), (0, 2), (1 << 40, 2)):
        with pytest.raises(UsageError):
            Ring(*sizes)


def test_another_user(engine: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel would tell it: of the two ends, only the engine's sees the stranger."""
    with monkeypatch.context() as patched:
        patched.setattr(connections, "peer_uid", lambda sock: os.geteuid() + 1)
        with pytest.raises(PeerError, match="another user's process"):
            dial(engine[1], 1)
    a, b = socket.socketpair()
    try:
        with pytest.raises(PeerError, match="another user's process"):
            accept_peer(a, b"k" * 32, 1, uid=os.geteuid() + 1)
        b.setblocking(False)
        with pytest.raises(BlockingIOError):
            b.recv(1)  # nothing was said to it
    finally:
        a.close()
        b.close()


def test_another_key(engine: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_memory, "read_key", lambda where: b"x" * 32)
    with pytest.raises(PeerError, match="gone, or refused: see that both have the same key"):
        dial(engine[1], 1)
    monkeypatch.undo()


def test_an_engine_without_the_key_is_not_believed() -> None:
    a, b = socket.socketpair()

    def accept() -> None:
        with pytest.raises(PeerError):
            accept_peer(a, b"k" * 32, 1)

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(PeerError):
        dial_peer(b, b"q" * 32, 1)
    b.close()
    thread.join()
    a.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 4096])
def test_who_cannot_prove_the_key_is_hung_up_on(engine: tuple[Engine, Path], said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3)
        sock.connect(str(engine[1] / "refit.sock"))
        sock.sendall(said)
        got = b""
        try:
            while data := sock.recv(4096):
                got += data
        except ConnectionResetError:
            pass
        assert len(got) <= 50


def test_a_directory_or_key_that_others_can_read(tmp_path: Path) -> None:
    where = tmp_path / "d"
    where.mkdir(mode=0o755)
    with pytest.raises(PeerError, match="one user's"):
        private_directory(where)
    (tmp_path / "link").symlink_to(where)
    with pytest.raises(PeerError, match="one user's"):
        private_directory(tmp_path / "link")
    where.chmod(0o700)
    with pytest.raises(PeerError, match="no key"):
        read_key(where)
    key = local_memory.make_key(where)
    assert read_key(where) == key and (where / "refit.key").stat().st_mode & 0o777 == 0o600
    (where / "refit.key").chmod(0o640)
    with pytest.raises(PeerError, match="one user only"):
        read_key(where)
    (where / "refit.key").unlink()
    (where / "refit.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerError, match="no key"):
        read_key(where)


def test_two_engines_do_not_share_a_socket_and_a_dead_ones_is_taken_over(tmp_path: Path) -> None:
    first = Server(Engine().receiver, tmp_path / "d")
    with pytest.raises(PeerError, match="another engine listens"):
        Server(Engine().receiver, tmp_path / "d")
    first.close()
    (tmp_path / "d").mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "d/refit.sock"))
    with Server(Engine().receiver, tmp_path / "d"):
        dial(tmp_path / "d", 1).close()


def talk(where: Path) -> tuple[Connection, Ring, Any]:
    """A connection that has agreed on a plan."""
    plan, ring = make_plan([described(n, t) for n, t in model(1).items()], 4096), Ring(4096, 2)
    connection = dial(where, 2)
    connection.send(encode(agree(plan, ring)), 2, fd=ring.fd)
    assert isinstance(decode_answer(connection.receive(2, MAX_FRAME)), Agreed)
    return connection, ring, plan


def test_frames_that_end_the_connection(engine: tuple[Engine, Path]) -> None:
    def replayed(c: Connection) -> None:
        frame = c._sending.frame(encode(Ask()))
        c.sock.setblocking(True)
        c.sock.sendall(frame + frame)

    def oversized(c: Connection) -> None:
        frame = bytearray(c._sending.frame(encode(Ask())))
        frame[4:8] = (MAX_FRAME + 1).to_bytes(4, "little")
        c.sock.sendall(frame)

    def no_schema(c: Connection) -> None:
        c.send(b"\xc0", 1)

    def answered(c: Connection) -> None:
        c.send(encode(Told("clean", 9, 9)), 1)

    def half(c: Connection) -> None:
        c.sock.sendall(c._sending.frame(encode(Ask()))[:-1])

    def a_descriptor(c: Connection) -> None:
        with open(os.devnull) as file:
            c.send(encode(Ask()), 1, fd=file.fileno())

    def descriptors(c: Connection) -> None:
        with open(os.devnull) as file:
            socket.send_fds(c.sock, [c._sending.frame(encode(Ask()))], [file.fileno()] * 3)

    def no_ring(c: Connection) -> None:
        c.send(encode(agree(make_plan([described("a", model(1)["head"])], 4096), ring_of(0))), 1)

    for misbehave in (replayed, oversized, no_schema, answered, half, a_descriptor, descriptors, no_ring):
        connection, ring, _ = talk(engine[1])
        misbehave(connection)
        with pytest.raises(PeerError, match="gone"):
            for _ in range(3):
                connection.receive(3, MAX_FRAME)
        connection.close()
        ring.close()
        assert engine[0].look() == 0


def test_a_peer_that_says_nothing_is_not_waited_for() -> None:
    a, b = socket.socketpair()
    try:
        with pytest.raises(PeerError, match="in time"):
            dial_peer(a, b"k" * 32, 0.05)
    finally:
        a.close()
        b.close()


def test_a_frame_longer_than_was_allowed_is_not_read() -> None:
    a, b = socket.socketpair()
    made: list[Connection] = []
    thread = threading.Thread(target=lambda: made.append(accept_peer(a, b"k" * 32, 2)))
    thread.start()
    mine = dial_peer(b, b"k" * 32, 2)
    thread.join()
    mine.send(bytes(1000), 1)
    with pytest.raises(FrameError, match="too long"):
        made[0].receive(1, 999)
    mine.close()
    made[0].close()
