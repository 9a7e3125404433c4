"""URLs of engines: which sinks stand for one.

unix:///DIR                 our socket: DIR itself, or DIR/rank-0, DIR/rank-1 ... one an engine rank
http://host:port            asked what it is: our reference engine, SGLang, or vLLM
sglang+http://host:port     SGLang, without asking
file:///DIR                 a Hugging Face directory; ?to=torch_dist&tp=2 a Megatron one;
                            ?reload=http://host:port tells an engine to load it after each push
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from convtools.errors import UsageError, capped, tick
from convtools.refit.channels.local_memory import KEY, SOCKET
from convtools.refit.errors import PeerError
from convtools.refit.sinks.base import Sink
from convtools.refit.sinks.http_json import Base, ask, parse_base
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sinks.reference import MAX_PATH as _MAX_PATH, ReferenceSink, checked_directory
from convtools.refit.sinks.twice import refuse_twice

TIMEOUT = 10.0
KEY_VARIABLE = "CONVTOOLS_ENGINE_KEY"
"""Environment variable with the API key of a server that wants one: a command line is everybody's to read."""
SCHEMES = ("unix", "http", "https", "sglang+http", "sglang+https", "vllm+http", "vllm+https", "file")
_RANK = re.compile(r"rank-(0|[1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class Found:
    """What a URL leads to."""

    url: str
    kind: str
    """refit socket, reference engine, SGLang, vLLM, directory."""
    sinks: tuple[Sink, ...]
    """One an engine rank."""
    started_from: str | None = None
    """The checkpoint that the engine says it was started from."""


def is_url(text: str) -> bool:
    """Whether something that may be a path or a Hub id is the URL of an engine.

    >>> is_url("unix:///run/engine"), is_url("org/name"), is_url("C:/x")
    (True, False, False)
    """
    return "://" in text


def connect(
    url: str, *, source: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT
) -> list[Sink]:
    """The sinks of an engine, one a rank of it; `source` is what a directory takes its config.json from.

    Nothing is sent to them yet. Raises UsageError for what is no such URL, PeerError where no engine is.
    """
    return list(find(url, source=source, timeout=timeout).sinks)


def find(url: str, *, source: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT) -> Found:
    """The same, with what else the engine says of itself."""
    parts = _split(url)
    match parts.scheme:
        case "unix":
            return Found(url, "refit socket", _sockets(_path(parts, url), url))
        case "file":
            from convtools.refit.sinks.directory import directory_sink

            return Found(url, "directory", (directory_sink(url, _path(parts, url), parts.query, source),))
        case "http" | "https":
            return _probe(url, parse_base(url), timeout)
        case _:
            base = parse_base(url.partition("+")[2])
            return _sglang(url, base, {}) if parts.scheme.startswith("sglang") else _vllm(url, base)


def engine_key() -> str | None:
    """The API key for servers that want one. Raises UsageError for one that no header can carry."""
    key = os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY_VARIABLE} holds what no header can carry")
    return key or None


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{tick(url)} is no URL: {error}") from None
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{tick(url)} is no URL of an engine",
            expected="unix:///DIR, http://host:port, sglang+http://host:port, file:///DIR",
        )
    return parts


def _path(parts: SplitResult, url: str) -> Path:
    """The directory that a URL names."""
    path = unquote(parts.path)
    odd = parts.fragment or (parts.query and parts.scheme != "file") or "\0" in path
    odd = odd or not os.path.basename(os.path.normpath(path))  # the root
    if parts.netloc or not path.startswith("/") or len(path) > _MAX_PATH or odd:
        raise UsageError(
            f"{tick(url)} names no directory",
            expected=f"{parts.scheme}:///DIR, three slashes and an absolute path",
        )
    return Path(path)


def _sockets(directory: Path, url: str) -> tuple[Sink, ...]:
    """The engine that listens in a directory, or the ranks in the directories below."""
    if not directory.is_dir():
        raise PeerError(
            f"there is no directory {tick(os.fspath(directory))}", fix="is the engine up, and is it here?"
        )
    if any(os.path.lexists(directory / name) for name in (SOCKET, KEY)):
        return (LocalSink(directory, name=url),)
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise PeerError(f"cannot look into it: {error.strerror}", where=directory) from None
    ranks = sorted(int(found[1]) for name in names if (found := _RANK.fullmatch(name)))
    if not ranks:
        raise PeerError(
            "no engine listens there", where=directory,
            expected=f"`{SOCKET}`, or folders `rank-0`, `rank-1` ...",
            fix="wait until the engine is up, and give the directory that it names",
        )  # fmt: skip
    if ranks != list(range(len(ranks))):
        raise PeerError(
            "ranks of the engine are missing", where=directory, expected=f"rank-0 to rank-{ranks[-1]}",
            found=capped(f"rank-{n}" for n in ranks), fix="wait until all of them are up",
        )  # fmt: skip
    return tuple(LocalSink(directory / f"rank-{n}", name=f"{url.rstrip('/')}/rank-{n}") for n in ranks)


def _probe(url: str, base: Base, timeout: float) -> Found:
    """Ask a server what it is."""
    key = engine_key()
    reply = ask(base, "/refit", timeout, key=key)
    if reply.status == 200 and "directory" in reply.body:
        told = ask(base, "/info", timeout, key=key)
        return _reference(url, base, reply.body | {"model": told.body.get("model")})
    for path in ("/model_info", "/get_model_info", "/get_server_info"):
        reply = ask(base, path, timeout, key=key)
        if reply.status in (401, 403):
            raise UsageError(
                f"{url} wants an API key", found=f"HTTP {reply.status}", fix=f"give it in {KEY_VARIABLE}"
            )
        if reply.status == 200 and "model_path" in reply.body:
            return _sglang(url, base, reply.body)
    reply = ask(base, "/version", timeout, key=key)
    if reply.status == 200 and isinstance(reply.body.get("version"), str):
        raise UsageError(
            f"{url} looks like vLLM, whose own routes are not used",
            fix="start vLLM with our worker extension and give its socket, unix:///DIR (docs/vllm.md)",
        )
    raise PeerError(
        f"{url} is no engine that is known", expected="`convtools engine`, or SGLang",
        found=f"HTTP {reply.status} to {path}", fix="name its kind: sglang+http://..., or give unix:///DIR",
    )  # fmt: skip


def _reference(url: str, base: Base, said: dict[str, Any]) -> Found:
    directory, model = checked_directory(url, base, said["directory"]), said.get("model")
    sink = ReferenceSink(directory, base, name=url, key=engine_key())
    return Found(url, "reference engine", (sink,), _text(model))


def _sglang(url: str, base: Base, said: dict[str, Any]) -> Found:
    try:
        from convtools.refit.sinks.sglang import SGLangSink
    except ImportError as error:
        raise UsageError(f"{url}: SGLang cannot be reached: {error}", fix="see docs/sglang.md") from None
    return Found(
        url, "SGLang", (SGLangSink(str(base), api_key=engine_key(), name=url),), _text(said.get("model_path"))
    )


def _vllm(url: str, base: Base) -> Found:
    raise UsageError(
        f"{url}: vLLM's own routes are not used: they exist in its development mode only, which lets "
        "anyone who reaches the port run code",
        fix="start vLLM with our worker extension and give its socket, unix:///DIR (docs/vllm.md)",
    )


def _text(value: object) -> str | None:
    fits = isinstance(value, str) and 0 < len(value) <= _MAX_PATH and value.isprintable()
    return value if fits and isinstance(value, str) else None


def connect_all(
    urls: Sequence[str], *, source: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT
) -> list[Sink]:
    """The sinks of several URLs, directories first: theirs is the commit that can fail for want of space.

    Raises UsageError for one engine under two URLs, and what `connect` raises.
    """
    return [sink for found in find_all(urls, source=source, timeout=timeout) for sink in found.sinks]


def find_all(
    urls: Sequence[str], *, source: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT
) -> list[Found]:
    """The same, with what else the engines say of themselves."""
    if len(set(urls)) != len(urls):
        raise UsageError("an engine is given twice", found=capped(map(tick, urls)))
    first = sorted(urls, key=lambda url: not url.startswith("file:"))
    found = [find(url, source=source, timeout=timeout) for url in first]
    refuse_twice([sink for one in found for sink in one.sinks], timeout)
    return found


__all__ = [
    "KEY_VARIABLE",
    "SCHEMES",
    "Found",
    "connect",
    "connect_all",
    "engine_key",
    "find",
    "find_all",
    "is_url",
]
