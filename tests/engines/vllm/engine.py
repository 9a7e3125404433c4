"""An engine of vLLM in a process of its own, as a test holds it."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPO = HERE.parents[2]
PROMPTS = [[1, *[(7 * i * k + 13) % 300 + 4 for i in range(12)]] for k in range(1, 5)]


def venv() -> Path:
    """Where vLLM is installed."""
    return Path(os.environ.get("CONVTOOLS_VLLM_VENV", REPO / ".venv-vllm"))


def environment(shim: bool = False) -> dict[str, str]:
    """For processes of vLLM; `shim`: with the kernels that Nemotron-H needs on a CPU."""
    paths = [*([str(REPO / "engines" / "vllm")] if shim else []), str(HERE), str(REPO)]
    ours = ("PYTHON", "OMP_", "VLLM_")  # of this process, not of that one
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


class Engine:
    """Starts on entering, ends with all of its processes on leaving."""

    def __init__(
        self, model: Path, directory: Path | None, log: Path, shim: bool = False,
        env: dict[str, str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._env = environment(shim) | (env or {})
        self._command = [
            str(venv() / "bin" / "python"), str(HERE / "host.py"), str(model), str(directory or "-"),
            json.dumps(options),
        ]  # fmt: skip
        self._log = log

    def __enter__(self) -> "Engine":
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        if self._receive() != "ready":
            raise RuntimeError(self.said())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()

    def ask(self, do: str, *given: Any) -> Any:
        """A command of host.py, and what it found."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([do, *given]) + "\n")
        self._process.stdin.flush()
        found = self._receive()
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(found["error"])
        return found

    def answers(self, prompts: list[list[int]] | None = None, count: int = 16) -> list[Any]:
        """Tokens and logprobs of each prompt."""
        found = self.ask("generate", PROMPTS if prompts is None else prompts, count)
        return [(one["tokens"], one["logprobs"]) for one in found]

    def digests(self) -> list[dict[str, str]]:
        """Of each rank's own parameters."""
        found: list[dict[str, str]] = self.ask("call", "refit_digests")
        return found

    def states(self) -> list[tuple[str, int]]:
        """State and version of each rank."""
        return [(one["state"], one["version"]) for one in self.ask("call", "refit_state")]

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-6000:]

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended: {self.said()}")
        return json.loads(line)
