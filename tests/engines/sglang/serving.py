"""SGLang's own server, as a process of another virtual environment, and what it answers."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
STUBS = ROOT / "engines" / "sglang" / "stubs"
VENV = Path(os.environ.get("CONVTOOLS_SGLANG_VENV", ROOT / ".venv-sglang"))
PYTHON = VENV / "bin" / "python"
KEY = "a key of this test"
PROMPTS = [[1] + [(7 * i * k + 13) % 300 + 4 for i in range(12)] for k in range(1, 5)]
NEW_TOKENS = 16


class Snapshot(NamedTuple):
    """What a server says and what it holds."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    checksums: list[dict[str, str]]
    """By rank."""


class Server(NamedTuple):
    """A running server."""

    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: object = None, timeout: float = 60, key: str = KEY) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        assert response.status == 200, (path, response.status, text[:500])
        return json.loads(text)

    def generate(self, prompts: list[list[int]], tokens: int = NEW_TOKENS, timeout: float = 60) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        return self.ask("/generate", body, timeout)

    def snapshot(self) -> Snapshot:
        answers = self.generate(PROMPTS)
        ranks = self.ask("/weights_checker", {"action": "checksum"})["ranks"]
        return Snapshot(
            [a["output_ids"] for a in answers],
            [[p[0] for p in a["meta_info"]["output_token_logprobs"]] for a in answers],
            [rank["checksums"] for rank in ranks],
        )

    def version(self) -> str:
        return str(self.ask("/model_info")["weight_version"])

    def step(self) -> int:
        """The version as a trainer counts."""
        return 0 if (found := self.version()) == "default" else int(found)


@contextmanager
def serving(model: Path, log: Path, *, tp: int = 1, wait: float = 240) -> Iterator[Server]:
    """A server of `model`, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--tp", str(tp), "--api-key", KEY, "--device", "cpu", "--dtype", "bfloat16",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
        "--disable-overlap-schedule", "--context-length", "512", "--max-total-tokens", "2048",
        "--max-running-requests", "4", "--disable-radix-cache", "--mem-fraction-static", "0.5",
        "--grammar-backend", "none", "--chunked-prefill-size", "-1", "--skip-server-warmup",
        "--random-seed", "1",
    ]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    env = os.environ | {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        "PYTHONPATH": str(STUBS), "PYTHONDONTWRITEBYTECODE": "1", "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    server = Server(port, log)
    try:
        _await(process, server, wait)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(process: subprocess.Popen[bytes], server: Server, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            server.ask("/model_info", timeout=5)
            if server.ask("/server_info", timeout=5).get("status") == "ready":
                server.generate([[1, 2, 3]], 1)
                return
        except (OSError, http.client.HTTPException, AssertionError):
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{server.log.read_text(errors='replace')[-3000:]}")
