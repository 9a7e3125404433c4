"""vLLM's HTTP server, started as docs/vllm.md says: pushed into, and no route of developers opens."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.sinks.url import connect
from convtools.refit.sync import WeightSync
from tests.engines.vllm.engine import PROMPTS, REPO, environment, venv

pytestmark = pytest.mark.vllm


def documented(directory: Path) -> list[str]:
    """The options that docs/vllm.md starts it with."""
    text = (REPO / "docs" / "vllm.md").read_text()
    found = re.search(r"vllm serve \S+ \\\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " ").replace("/tmp/refit", str(directory)))


class Server:
    def __init__(self, port: int, model: Path) -> None:
        self._root, self._model = f"http://127.0.0.1:{port}", str(model)

    def post(self, route: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(self._root + route, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def tokens(self, prompt: list[int]) -> list[int]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        found = self.post("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
        return list(found["choices"][0]["token_ids"])

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(self._root + "/health", timeout=2):
                return True
        except OSError:
            return False


@contextmanager
def serving(model: Path, directory: Path, log: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(venv() / "bin" / "python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    ]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8"]
    command += ["--host", "127.0.0.1", "--port", str(port), *documented(directory)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment(), stdout=file, stderr=file, start_new_session=True
        )
    try:
        server, until = Server(port, model), time.monotonic() + 240
        while not server.is_up():
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server(checkpoint: Callable[[str, str], Path], fresh: Callable[..., Any], tmp_path: Path) -> None:
    wanted = [tokens for tokens, _ in fresh("llama", "b")][: len(PROMPTS)]
    directory = tmp_path / "refit"
    directory.mkdir(mode=0o700)
    with serving(checkpoint("llama", "a"), directory, tmp_path / "log") as server:
        before = [server.tokens(prompt) for prompt in PROMPTS]
        assert before != wanted
        sinks = connect(f"unix://{directory}")
        with WeightSync(str(checkpoint("llama", "b")), sinks, bucket_bytes=1 << 16) as sync:
            sync.push(version=1)
            assert [server.tokens(prompt) for prompt in PROMPTS] == wanted
            assert sync.verify().equal and sync.check().ok
        for route in ("/collective_rpc", "/init_weight_transfer_engine", "/pause"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post(route, {})
            with refused.value as error:
                assert error.code == 404
