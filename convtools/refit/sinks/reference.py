"""Our reference engine as a sink: its refit socket, and what it answers over HTTP for the self-test."""

import json
import os
from pathlib import Path

from convtools.errors import tick
from convtools.refit.channels.connection import Connection
from convtools.refit.errors import PeerError
from convtools.refit.sinks.http_json import Base, ask
from convtools.refit.sinks.local import LocalSink

_PROMPTS = ([0, 1, 2, 3], [3, 2, 1])
_TOKENS = 8
MAX_PATH = 4096
"""Of a directory that an engine names."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


class ReferenceSink(LocalSink):
    """The engine that answers at `base`, and whose socket is in `directory`.

    One that was started again listens in another directory, so it is asked anew at each connection.
    """

    def __init__(
        self, directory: str | os.PathLike[str], base: Base, name: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(directory, name or str(base))
        self._base, self._key = base, key

    def _dial(self, timeout: float) -> Connection:
        self.directory = checked_directory(self.name, self._base, self._named(timeout))
        return super()._dial(timeout)

    def _named(self, timeout: float) -> object:
        try:
            reply = ask(self._base, "/refit", timeout, key=self._key)
        except PeerError as error:
            raise PeerError(
                f"the engine does not answer: {error.what}", where=error.where,
                fix="if it has ended, start it again at this address (convtools engine MODEL --port N): the "
                "next push finds it",
            ) from None  # fmt: skip
        if reply.status != 200 or "directory" not in reply.body:
            raise PeerError("no `convtools engine` answers there now", found=f"HTTP {reply.status} to /refit")
        return reply.body["directory"]

    def outputs(self, timeout: float) -> bytes:
        """Greedy tokens and their logprobs, as they are now. Raises PeerError."""
        vocab = ask(self._base, "/info", timeout, key=self._key).body.get("vocab")
        if not isinstance(vocab, int) or vocab < 1:
            raise PeerError(f"{self.name} does not tell its vocabulary")
        prompts = [[token % vocab for token in prompt] for prompt in _PROMPTS]
        body = {"input_ids": prompts, "max_new_tokens": _TOKENS}
        reply = ask(self._base, "/generate", timeout, body=body, key=self._key)
        if reply.status != 200:
            raise PeerError(
                f"{self.name} does not answer", found=str(reply.body.get("error", reply.status))[:400]
            )
        return json.dumps([reply.body.get("ids"), reply.body.get("logprobs")]).encode()


def checked_directory(name: str, base: Base, directory: object) -> str:
    """A directory that the engine `name` says it listens in. Raises PeerError where it cannot be that."""
    fits = isinstance(directory, str) and 0 < len(directory) <= MAX_PATH and directory.isprintable()
    if not isinstance(directory, str) or not fits or not os.path.isabs(directory):
        raise PeerError(f"{name} names no directory of a socket", found=tick(directory))
    if not Path(directory).is_dir():
        raise PeerError(
            f"{name} listens in {tick(directory)}, which is not there",
            fix="start the engine again, or, where it runs in a container, share a directory with it: "
            "convtools engine --refit-dir DIR" if base.host in _LOCAL
            else "weights go through memory: run this on the engine's machine",
        )  # fmt: skip
    return directory
