"""Byte ranges of a Hub repository's files, at one commit: exactly those bytes, or an error.

`huggingface_hub` downloads whole files; a slice needs a few of a file's tensors. The requests here go
through its session, with its headers, so token, proxies and endpoint are those its users have set.
A connection that breaks goes on at the byte where it broke. An answer that is not what was asked for
(other range, other length, another version of the file) is refused: its bytes would be wrong ones.
"""

import random
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from convtools.errors import CheckpointError, ConvtoolsError, StorageError
from convtools.stores.hub_answers import asked_wait, origin, plain, target
from convtools.stores.hub_errors import explain, hub_errors, library, transport_errors

if TYPE_CHECKING:
    from convtools.stores.hub_files import Repository

_T = TypeVar("_T")
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_EXPIRED = (400, 401, 403, 404, 410)
"""What storage answers to a signed URL whose time is over."""
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_PROGRESS = 1 << 20
"""So many bytes more, and earlier failures are forgiven."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try again where a network or a server fails."""

    attempts: int = 8
    """Failures in a row after which it is given up."""
    first: float = 0.5
    """Seconds to wait after the first failure; twice as long after each further one."""
    longest: float = 30.0
    longest_asked: float = 300.0
    """The longest wait that a server may ask for; the Hub counts requests in windows of so long."""

    def delay(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after so many failures; `asked` is the server's wish."""
        if asked is not None:
            return max(0.0, min(asked, self.longest_asked))
        return min(self.longest, self.first * 2.0 ** (failures - 1)) * random.uniform(0.75, 1.0)


class RemoteFile(NamedTuple):
    """A file as the Hub lists it."""

    size: int
    etag: str | None
    """Its sha256 where it is stored as a large file, else its git hash; None where that was not said."""


class _Again(Exception):
    """A failure that may pass."""

    def __init__(self, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.wait = wait


def patiently(
    call: Callable[[], _T],
    patience: Patience,
    stop: threading.Event,
    *,
    where: str,
    kind: type[ConvtoolsError] = CheckpointError,
) -> _T:
    """`call()`, a request of `huggingface_hub`, again after failures that may pass.

    Raises `kind`, which says what to do, for all others. Without any connection it does not wait long.
    """
    failures = 0
    while True:
        try:
            return call()
        except hub_errors() as error:
            failures += 3 if type(error).__name__ == "ConnectError" else 1
            response = getattr(error, "response", None)
            status = None if response is None else response.status_code
            passing = status in _TRANSIENT or (status is None and isinstance(error, transport_errors()))
            if not passing or failures >= min(patience.attempts, 6):
                raise explain(error, where, kind) from None
            asked = None if response is None else asked_wait(response.headers)
        except (TypeError, KeyError, ValueError, AttributeError) as error:  # it takes answers on trust
            raise kind(
                "the Hub's answer makes no sense",
                where=where,
                found=f"{type(error).__name__}: {error}"[:300],
                fix="is HF_ENDPOINT right? A proxy or mirror may answer in the Hub's place",
            ) from None
        _wait(patience.delay(failures, asked), stop)


class Ranges:
    """Reads byte ranges of a repository's files at one commit. Safe to share among threads."""

    def __init__(
        self,
        repository: "Repository",
        patience: Patience | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        import convtools

        self._files = repository.files
        self._repo_id, self._commit = repository.repo_id, repository.commit
        self._patience = patience or repository.patience
        self._stop = stop or repository.stop
        hub = library()
        self._headers: dict[str, str] = hub.utils.build_hf_headers(
            library_name="convtools", library_version=convtools.__version__
        )
        self._timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._hubs = {origin(hub.constants.ENDPOINT), origin("https://huggingface.co")}
        self._signed: dict[str, str] = {}  # file -> where the Hub sent us for it
        self._etags: dict[tuple[str, str], str] = {}  # (file, host) -> what its first answer said

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Bytes of `file`. Raises as `copy` does."""
        data = bytearray(nbytes)

        def put(at: int, piece: bytes) -> None:
            data[at : at + len(piece)] = piece

        self.copy(file, offset, nbytes, put)
        return bytes(data)

    def copy(self, file: str, offset: int, nbytes: int, put: Callable[[int, bytes], None]) -> None:
        """Call `put(at, piece)` for the bytes of `file` from `offset` on, in order, in small pieces.

        Raises CheckpointError for an answer that is not the bytes asked for, and where the failures
        do not end; StorageError on a wish to stop. No byte that `put` was given is a wrong one.
        """
        where, size = f"hf:/{self._repo_id}@{self._commit}/{file}", self._files[file].size
        if not 0 <= offset <= offset + nbytes <= size:
            raise CheckpointError(
                "a range outside the file",
                where=f"{where}:{offset}",
                expected=f"at most {size} bytes",
                found=f"{offset + nbytes}",
            )
        done = forgiven = failures = 0
        wait: float | None
        while done < nbytes:
            try:
                with closing(self._pieces(file, offset + done, offset + nbytes, where)) as pieces:
                    for piece in pieces:
                        if self._stop.is_set():
                            raise StorageError("stopped before the end")
                        put(done, piece)
                        done += len(piece)
                if done == nbytes:
                    return
                what, wait = "the answer ended early", None
            except _Again as again:
                what, wait = str(again), again.wait
            except transport_errors() as error:
                what, wait = f"{type(error).__name__}: {error}", None
            except hub_errors() as error:  # no answer, and none that another request would get
                raise explain(error, where) from None
            if done - forgiven >= _PROGRESS:
                failures, forgiven = 0, done
            failures += 1
            if failures >= self._patience.attempts:
                raise CheckpointError(
                    f"the download failed {failures} times in a row",
                    where=f"{where}:{offset + done}",
                    found=what,
                    fix="look at the connection, and run again",
                )
            _wait(self._patience.delay(failures, wait), self._stop)

    def _pieces(self, file: str, start: int, end: int, where: str) -> Generator[bytes, None, None]:
        """The body of one answer to one request, or a part of it, after all that it says was checked."""
        hub = library()
        signed = self._signed.get(file)
        url = signed or hub.hf_hub_url(self._repo_id, file, revision=self._commit)
        for _ in range(_MAX_REDIRECTS):
            mine = origin(url) in self._hubs  # nobody else is to see the token
            headers = self._headers if mine else {"user-agent": self._headers.get("user-agent", "")}
            headers = headers | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            with hub.utils.get_session().stream(
                "GET", url, headers=headers, timeout=self._timeout, follow_redirects=False
            ) as answer:
                status: int = answer.status_code
                if status in _REDIRECTS:
                    self._check_version(file, answer.headers, url, where)
                    url = target(url, answer.headers.get("Location", ""), where)
                    if origin(url) not in self._hubs:
                        self._signed[file] = url  # until it expires
                    continue
                if status in _EXPIRED and not mine:
                    self._signed.pop(file, None)
                    raise _Again(f"storage refused the Hub's link (HTTP {status})", 0.0 if signed else None)
                if status in _TRANSIENT:
                    raise _Again(f"HTTP {status}", asked_wait(answer.headers))
                if status not in (200, 206):
                    self._refuse(answer, file, where)
                self._check_version(file, answer.headers, url, where)
                _check_range(answer, start, end, self._files[file].size, where)
                left = end - start
                for piece in answer.iter_raw():
                    if len(piece) > left:
                        raise _wrong(where, start, f"{end - start} bytes", "more than that")
                    left -= len(piece)
                    yield piece
                return
        raise CheckpointError(f"over {_MAX_REDIRECTS} redirects", where=where, fix="is HF_ENDPOINT right?")

    def _check_version(self, file: str, headers: Mapping[str, str], url: str, where: str) -> None:
        """Raise CheckpointError if an answer speaks of another version of `file` than was listed or read."""
        listed = self._files[file]
        linked = plain(headers.get("X-Linked-Etag"))
        etag = linked or plain(headers.get("ETag"))
        told = [("size", headers.get("X-Linked-Size"), str(listed.size))]
        if origin(url) in self._hubs:
            told.append(("commit", headers.get("X-Repo-Commit"), self._commit))
            if listed.etag and etag and (linked or _HASH.fullmatch(etag)):
                told.append(("hash", etag, listed.etag))
        if etag:
            told.append(("ETag", etag, self._etags.setdefault((file, urlsplit(url).netloc), etag)))
        for what, found, wanted in told:
            if found is not None and found != wanted:
                raise CheckpointError(
                    "the file changed while it was read",
                    where=where,
                    expected=f"{what} {wanted}",
                    found=found[:200],
                    fix="run again, from the start",
                )

    def _refuse(self, answer: Any, file: str, where: str) -> None:
        if answer.status_code == 416:
            raise _wrong(where, 0, f"a file of {self._files[file].size} bytes", "a shorter one")
        try:
            library().utils.hf_raise_for_status(answer)
        except hub_errors() as error:
            raise explain(error, where) from None
        raise _wrong(where, 0, "HTTP 206", f"HTTP {answer.status_code}")


def _check_range(answer: Any, start: int, end: int, size: int, where: str) -> None:
    """Raise CheckpointError unless an answer with bytes claims to be just the range that was asked for."""
    headers = answer.headers
    wanted = f"bytes {start}-{end - 1}/{size}"
    if (coding := headers.get("Content-Encoding", "identity")) != "identity":
        raise _wrong(where, start, "plain bytes", f"Content-Encoding {coding[:50]}")
    if answer.status_code == 200 and (start, end) != (0, size):
        raise _wrong(where, start, f"HTTP 206 with {wanted}", "HTTP 200: it ignores Range")
    if answer.status_code == 206:
        found = headers.get("Content-Range", "no Content-Range")
        match = _CONTENT_RANGE.fullmatch(found)
        if not match or [int(n) for n in match.groups()] != [start, end - 1, size]:
            raise _wrong(where, start, wanted, found[:100])
    length = headers.get("Content-Length")
    if length is not None and length != str(end - start):
        raise _wrong(where, start, f"{end - start} bytes", f"Content-Length {length[:50]}")


def _wrong(where: str, start: int, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        "the server did not send the bytes that were asked for",
        where=f"{where}:{start}",
        expected=expected,
        found=found,
        fix="run again; if it stays so, a proxy or mirror between here and the Hub is at fault",
    )


def _wait(seconds: float, stop: threading.Event) -> None:
    if stop.wait(seconds):
        raise StorageError("stopped before the end")
