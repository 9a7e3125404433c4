"""A small server that keeps the contract of SGLang 0.5.23's weight update, as read in its source.

It holds a model under fused names, loads what a pickle says lies in shared memory, and can be told to fail.
What it reads the pickles with is a reader of its own: it knows the few names that SGLang allows.
"""

import base64
import hashlib
import io
import json
import mmap
import os
import pickle
import re
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from convtools.refit.plan import Tensor
from convtools.stores.base import FROM_TORCH

WIDTH = 16
SHAPES = {
    "model.embed_tokens.weight": (40, WIDTH),
    "model.layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
    "model.layers.0.self_attn.k_proj.weight": (8, WIDTH),
    "model.layers.0.self_attn.v_proj.weight": (8, WIDTH),
    "model.layers.0.self_attn.o_proj.weight": (WIDTH, WIDTH),
    "model.layers.0.mlp.gate_proj.weight": (32, WIDTH),
    "model.layers.0.mlp.up_proj.weight": (32, WIDTH),
    "model.layers.0.mlp.down_proj.weight": (WIDTH, 32),
    "model.layers.0.input_layernorm.weight": (WIDTH,),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (40, WIDTH),
}
"""A model's tensors, by their Hugging Face names."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
PARTNERS = {"qkv_proj": 3, "gate_up_proj": 2}

Fault = Callable[[str, int], str | None]
"""(path, number of the request) -> what happens instead: drop, hang, error, refuse, long, garbage, drip."""


def own_name(name: str) -> str:
    """The parameter that a tensor goes to."""
    return re.sub(r"\b[a-z]+_proj\b", lambda found: FUSED.get(found[0], found[0]), name)


class FakeSGLang:
    """State and routes."""

    def __init__(self, *, tp: int = 1, key: str | None = None, **info: Any) -> None:
        self.tp, self.key = tp, key
        self.fault: Fault | None = None
        self.architecture = "LlamaForCausalLM"
        self.ignored: tuple[str, ...] = ()
        """Tensors that it skips without a word."""
        self.info = {
            "version": "0.5.23", "tp_size": tp, "dp_size": 1, "pp_size": 1, "nnodes": 1, "dtype": "float32",
            "quantization": None, "weight_cache_mode": "off", "disaggregation_mode": "null",
            "speculative_draft_model_path": None, "launch_command": "x", "device": "cpu",
        } | info  # fmt: skip
        self.calls: list[tuple[str, Any]] = []
        """Every POST: its path, and what of its body matters."""
        self.loads: list[list[str]] = []
        """Names of every load."""
        self.running = 0
        """Requests in flight."""
        self.faulted = False
        self._lock = threading.RLock()
        self.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._number = 0
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def start(self) -> None:
        """As after a start: old weights, no update, not paused."""
        self.info["startup_time"] = {"scheduler_e2e": time.perf_counter()}
        self.paused, self.session, self.version = False, False, "default"
        self.weights = {name: bytes(4) * _numel(shape) for name, shape in SHAPES.items()}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and object."""
        with self._lock:
            if body is not None:
                kept = {k: v for k, v in body.items() if k != "serialized_named_tensors"}
                self.calls.append((path, kept))
            match path:
                case "/server_info":
                    return 200, self.info
                case "/model_info":
                    return 200, {
                        "weight_version": self.version, "model_type": "llama", "model_path": "/m",
                        "architectures": [self.architecture],
                    }  # fmt: skip
                case "/weights_checker":
                    ranks = [{"checksums": self._checksums()} for _ in range(self.tp)]
                    return 200, {"success": True, "message": "Success.", "ranks": ranks}
                case "/generate":
                    if self.paused:
                        time.sleep(0.2)
                        return 503, {"message": "paused"}
                    said = hashlib.sha256(repr(self._checksums()).encode()).digest()
                    return 200, {"output_ids": list(said)}
            return (404, {"message": "Not Found"}) if body is None else self._post(path, body)

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/pause_generation":
                assert body["mode"] in ("abort", "retract")
                self.paused = True
                if body["mode"] == "abort":
                    self.running = 0
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "/continue_generation":
                self.paused = False
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "message": "", "new_version": self.version}
            case "/begin_weight_update":
                if not self.paused:
                    self.running = 0  # it waits for them
                if self.session:
                    return 400, {"success": False, "message": "a weight-update session is already open; call"}
                self.session = True
                return 200, {"success": True, "message": "Success"}
            case "/end_weight_update":
                if not self.session:
                    return 400, {"success": False, "message": "no weight-update session is open; call begin"}
                self.session = False
                return 200, {"success": True, "message": "Success"}
            case "/update_weights_from_tensor":
                return self._load(body)
        return 404, {"message": "Not Found"}

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.session:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end"}
        assert body["load_format"] == "flattened_bucket" and len(body["serialized_named_tensors"]) == self.tp
        seen = [read(text) for text in body["serialized_named_tensors"]]
        assert all(one == seen[0] for one in seen)
        names = [tensor.name for tensor, _ in seen[0]]
        fused = [own_name(n) for n in names]
        for name in set(fused):  # a loader that fuses as they come would lose half
            count = next((n for part, n in PARTNERS.items() if part in name), 1)
            assert fused.count(name) == count, names
        for tensor, data in seen[0]:
            if tensor.name in SHAPES and tensor.name not in self.ignored:
                assert tensor.shape == SHAPES[tensor.name] and len(data) == tensor.nbytes
                self.weights[tensor.name] = data
        self.loads.append(names)
        if body["weight_version"] is not None:
            self.version = body["weight_version"]
        if body["flush_cache"] and self.running and not self.paused:
            return 400, {"success": False, "message": "the cache was not flushed"}
        return 200, {"success": True, "message": "Success"}

    def _checksums(self) -> dict[str, str]:
        made: dict[str, Any] = {}
        for name in SHAPES:
            rows = 64 - 40 if "embed" in name or "lm_head" in name else 0  # zeros past the vocabulary
            made.setdefault(own_name(name), hashlib.sha256()).update(
                self.weights[name] + bytes(4 * rows * WIDTH)
            )
        return {name: value.hexdigest()[:16] for name, value in made.items()}

    def next_fault(self, path: str) -> str | None:
        with self._lock:
            self._number += 1
            found = self.fault(path, self._number) if self.fault is not None else None
            self.faulted = self.faulted or found is not None
            return found


def _handler(server: FakeSGLang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._do(None)

        def do_POST(self) -> None:
            self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _do(self, body: dict[str, Any] | None) -> None:
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                return self._send(401, b'{"error":"Unauthorized"}')
            match fault := server.next_fault(self.path):
                case "drop":
                    self.close_connection = True
                    return None
                case "hang":
                    time.sleep(2)
                    self.close_connection = True
                    return None
                case "error":
                    return self._send(500, b"Internal Server Error")
                case "refuse":
                    return self._send(400, b'{"success":false,"message":"no"}')
                case "long":
                    return self._send(200, b'{"a":"' + b"x" * (9 << 20) + b'"}')
                case "garbage":
                    return self._send(200, b"\xff[[[[")
                case "moved":
                    return self._send(302, b"")
                case "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
                    for _ in range(40):
                        time.sleep(0.05)
                        self.wfile.write(b" ")
                        self.wfile.flush()
                    return None
            status, found = server.answer(self.path, body)
            if fault == "late":  # it was done, and nobody heard
                self.close_connection = True
                return None
            return self._send(status, json.dumps(found).encode())

        def _send(self, status: int, data: bytes) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # who asked has gone

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True

    return Handler


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


class _Metadata(SimpleNamespace):
    pass


class _Reader(pickle.Unpickler):
    """The names of SGLang's allow-list that a bucket needs, as functions that torch is not needed for."""

    def find_class(self, module: str, name: str) -> Any:
        reductions = "torch.multiprocessing.reductions"
        known: dict[tuple[str, str], Any] = {
            ("_codecs", "encode"): lambda text, coding: text.encode(coding),
            ("torch", "Tensor"): "Tensor",
            ("torch", "Size"): tuple,
            ("torch", "uint8"): "uint8",
            ("torch.storage", "UntypedStorage"): "UntypedStorage",
            (reductions, "rebuild_tensor"): _tensor,
            (reductions, "rebuild_typed_storage"): lambda storage, dtype: (storage, dtype),
            (reductions, "rebuild_storage_filename"): _storage,
            ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _Metadata,
        }
        if module == "torch" and name in FROM_TORCH:
            return name
        return known[module, name]


def _storage(kind: str, manager: bytes, handle: bytes, nbytes: int) -> bytes:
    """As torch maps it: a header of 64 bytes, whose first 4 count the users, then the data."""
    assert kind == "UntypedStorage" and manager == b"" and handle[:1] == b"/" and b"/" not in handle[1:]
    path = "/dev/shm" + handle.decode()
    fd = os.open(path, os.O_RDWR)
    try:
        assert os.fstat(fd).st_size >= nbytes + 64 and os.fstat(fd).st_mode & 0o777 == 0o600
        with mmap.mmap(fd, nbytes + 64) as mapping:
            assert struct.unpack_from("<i", mapping)[0] > 1000
            data = mapping[64 : 64 + nbytes]
    finally:
        os.close(fd)
    os.unlink(path)  # as the manager of the server's side does after use
    return data


def _tensor(kind: str, storage: tuple[bytes, str], layout: tuple[int, Any, Any, bool]) -> bytes:
    offset, size, stride, requires_grad = layout
    data, dtype = storage
    assert (kind, dtype, offset, stride, requires_grad) == ("Tensor", "uint8", 0, (1,), False)
    assert size == (len(data),)
    return data


def read(text: str) -> list[tuple[Tensor, bytes]]:
    """A payload -> tensors and their bytes."""
    found = _Reader(io.BytesIO(base64.b64decode(text, validate=True))).load()
    assert set(found) == {"flattened_tensor", "metadata"}
    out = []
    for meta in found["metadata"]:
        tensor = Tensor(meta.name, FROM_TORCH[meta.dtype], meta.shape)
        assert meta.end_idx - meta.start_idx == meta.numel == tensor.nbytes and meta.start_idx % 256 == 0
        out.append((tensor, found["flattened_tensor"][meta.start_idx : meta.end_idx]))
    return out
