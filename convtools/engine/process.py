"""The reference engine in a process of its own: started, waited for, and gone at the end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from convtools.engine.reference import SHADOW
from convtools.errors import ConvtoolsError

READY = "ready: "
"""What the line begins with that `convtools engine` prints when it serves; its URL follows."""
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that runs."""

    url: str
    """Where it answers HTTP."""
    refit_dir: Path
    """The directory of its refit socket."""
    pid: int
    """Its process."""

    def get(self, page: str) -> Any:
        """The JSON of a page, such as `info`. Raises urllib's errors."""
        with urllib.request.urlopen(f"{self.url}/{page}", timeout=60) as answer:
            return json.load(answer)

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """POST /generate: its answer as JSON, `ids`, `logprobs` and `versions`. Raises urllib's errors."""
        body = json.dumps({"input_ids": input_ids} | options).encode()
        with urllib.request.urlopen(f"{self.url}/generate", body, timeout=600) as answer:
            return json.load(answer)


@contextmanager
def started(
    model: str | os.PathLike[str],
    *,
    mode: str = SHADOW,
    version: int = 0,
    refit_dir: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    timeout: float = 180.0,
) -> Iterator[Started]:
    """Run `convtools engine MODEL` until the block ends; gives it when it serves.

    It also ends when this process does. Raises ConvtoolsError, with what it said, where it does not come up.
    """
    command = [
        sys.executable, "-m", "convtools", "engine", os.fspath(model), "--port", "0", "--mode", mode,
        "--version", str(version), "--with-parent",
    ]  # fmt: skip
    if refit_dir is not None:
        command += ["--refit-dir", os.fspath(refit_dir)]
    if threads is not None:
        command += ["--threads", str(threads)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        try:
            url = _await(process, said, timeout)
            with urllib.request.urlopen(f"{url}/refit", timeout=60) as answer:
                yield Started(url, Path(json.load(answer)["directory"]), process.pid)
        finally:
            _end(process)


def _await(process: "subprocess.Popen[bytes]", said: IO[bytes], timeout: float) -> str:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        ended = process.poll() is not None
        lines = os.pread(said.fileno(), 1 << 20, 0).decode(errors="replace")
        for line in lines.splitlines(keepends=True):
            if line.startswith(READY) and line.endswith("\n"):
                return line.removeprefix(READY).split()[0]
        if ended:
            raise ConvtoolsError("the engine did not start", found=lines.strip()[-2000:] or "it said nothing")
        time.sleep(0.05)
    raise ConvtoolsError(f"the engine was not ready after {timeout:g} s", found=lines.strip()[-2000:] or None)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, make it, and take its place in the process table."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
