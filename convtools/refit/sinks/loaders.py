"""Engines that load a directory when they are told to, for the file channel."""

from collections.abc import Sequence
from pathlib import Path

from convtools.errors import UsageError, tick
from convtools.refit.errors import RefitError
from convtools.refit.plan import Tensor
from convtools.refit.serving import held, served, standing
from convtools.refit.sinks.base import Sink
from convtools.refit.sinks.http_json import Base, ask, number, parse_base
from convtools.refit.sinks.reload import Loader

TIMEOUT = 600.0
"""Seconds that loading a directory may take."""


class SGLangLoader:
    """SGLang, by its route `/update_weights_from_disk`; it empties its caches with it."""

    def __init__(self, base: Base, *, timeout: float = TIMEOUT, key: str | None = None) -> None:
        self.base, self._timeout, self._key = base, timeout, key

    def load(self, directory: Path, version: int) -> None:
        """Raises PeerError, RefitError with SGLang's own words."""
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
        reply = ask(self.base, "/update_weights_from_disk", self._timeout, body=body, key=self._key)
        if reply.status != 200 or reply.body.get("success") is not True:
            raise RefitError(
                "the engine did not load the directory", where=directory,
                found=f"HTTP {reply.status}: {tick(reply.body.get('message', 'no message'))}",
            )  # fmt: skip

    def version(self) -> int | None:
        """Its weight version; None where it has none, or one that is no number."""
        for path in ("/model_info", "/get_model_info"):
            reply = ask(self.base, path, self._timeout, key=self._key)
            if reply.status == 200:
                return number(reply.body.get("weight_version"))
        return None

    def fingerprints(self, tensors: Sequence[Tensor]) -> None:
        """Its own parameters are fused and cut: it cannot say."""
        return None


class SocketLoader:
    """An engine with our socket, which takes the directory's files over it and tells what it serves."""

    def __init__(self, sink: Sink, *, timeout: float = TIMEOUT) -> None:
        self.sink, self._timeout = sink, timeout

    def load(self, directory: Path, version: int) -> None:
        """Raises what a push raises."""
        from convtools.refit.sync import WeightSync

        with WeightSync(str(directory), [self.sink], timeout=self._timeout, finite=False) as sync:
            sync.push(version, force=True)

    def version(self) -> int:
        """Raises RefitError."""
        return standing(self.sink, self._timeout).version

    def fingerprints(self, tensors: Sequence[Tensor]) -> tuple[bytes, ...]:
        """Of its own bytes, of each tensor that it holds or that the push brought."""
        names = {t.name for t in held(self.sink, self._timeout) or tensors}
        if missing := [t.name for t in tensors if t.name not in names]:
            raise RefitError("the engine holds other tensors", found=tick(missing[0]))
        return served(self.sink, tensors, self._timeout).fingerprints


def loader_of(url: str, timeout: float = 10.0) -> Loader:
    """The engine at a URL, as one that loads directories. Raises UsageError, PeerError."""
    from convtools.refit.sinks.url import engine_key, find

    key = engine_key()
    if url.startswith(("sglang+http://", "sglang+https://")):
        return SGLangLoader(parse_base(url.partition("+")[2]), key=key)
    if url.startswith(("http://", "https://")):
        base = parse_base(url)
        reply = ask(base, "/model_info", timeout, key=key)
        if reply.status == 200 and "model_path" in reply.body:
            return SGLangLoader(base, key=key)
    found = find(url, timeout=timeout)
    if found.kind in ("reference engine", "refit socket") and len(found.sinks) == 1:
        return SocketLoader(found.sinks[0])
    raise UsageError(f"{url} cannot be told to load a directory", expected="SGLang, or `convtools engine`")


__all__ = ["SGLangLoader", "SocketLoader", "loader_of"]
