"""Damaged, unreadable, vanishing: never "equal", and 2 where nothing is proven."""

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools import CompareOptions, compare
from convtools.equality import screening
from convtools.equality.canonical import open_side
from convtools.equality.verdict import DIFFERS, UNREADABLE
from convtools.errors import CheckpointError, ConvtoolsError, UsageError
from tests.commands import ROOT, run
from tests.convert.small import write_safetensors, write_small_hf
from tests.equality.equal_pairs import QWEN3_MOE, array, put, write_hf, write_megatron
from tests.tensors import Content


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal folders."""
    return write_hf(QWEN3_MOE, tmp_path / "a"), write_hf(QWEN3_MOE, tmp_path / "b")


def cut(path: Path, n: int = 100) -> None:
    os.truncate(path, path.stat().st_size - n)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a safetensors header, bytes left as they are."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n :])


HEAD = "lm_head.weight"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a truncated shard": lambda b: cut(b / "model.safetensors"),
    "an empty shard": lambda b: (b / "model.safetensors").write_bytes(b""),
    "no shard": lambda b: (b / "model.safetensors").unlink(),
    "no config": lambda b: (b / "config.json").unlink(),
    "a config that is no JSON": lambda b: (b / "config.json").write_text("{"),
    "a header that lies": lambda b: rewrite(
        b / "model.safetensors", lambda h: h["lm_head.weight"].update(shape=[9, 9])
    ),
    "a header of rubbish": lambda b: (b / "model.safetensors").write_bytes(b"\xff" * 500),
    "a folder in its place": lambda b: (
        (b / "model.safetensors").unlink(),
        (b / "model.safetensors").mkdir(),
    ),
    "a pipe in its place": lambda b: ((b / "model.safetensors").unlink(), os.mkfifo(b / "model.safetensors")),
    "nothing at all": lambda b: shutil.rmtree(b),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_opened(damage: str, pair: tuple[Path, Path]) -> None:
    a, b = pair
    DAMAGE[damage](b)
    for sides in ((a, b), (b, a), (b, b)):
        with pytest.raises(ConvtoolsError):
            compare(*sides)
    done = run("compare", a, b, "--json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["equal"] is None


@pytest.mark.parametrize("to", ["torch_dist", "torch"])
def test_a_megatron_checkpoint_that_lost_bytes(to: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    b = write_megatron(QWEN3_MOE, pair[0], tmp_path / "m", to)
    victim = max((p for p in b.rglob("*") if p.suffix in (".distcp", ".pt")), key=lambda p: p.stat().st_size)
    cut(victim, 5000)
    with pytest.raises(CheckpointError):
        compare(pair[0], b)
    victim.unlink()
    with pytest.raises(ConvtoolsError):
        compare(pair[0], b)


def test_a_damaged_manifest(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"schema": "convtools.manifest/1", "tensors": 3}')
    done = run("compare", pair[0], tmp_path / "m.json")
    assert done.returncode == 2 and "manifest" in done.stderr
    assert run("compare", pair[0], tmp_path / "none.json").returncode == 2


def test_truncated_after_it_was_opened(pair: tuple[Path, Path]) -> None:
    """The bytes are no longer there: an error, not a signal; and what was read proves nothing."""
    a, side = pair[0], open_side(pair[1])
    cut(pair[1] / "model.safetensors", 3000)
    found = compare(a, side)
    assert (found.equal, found.exit_code) == (None, 2) and "changed while it was compared" in found.verdict
    unread = [r for r in found.tensors if r.verdict == UNREADABLE]
    assert unread and all("ends before the tensor's bytes do" in (r.cause or "") for r in unread)


def test_gone_or_replaced_after_it_was_opened(pair: tuple[Path, Path]) -> None:
    a, path = pair[0], pair[1] / "model.safetensors"
    side = open_side(pair[1])
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    os.replace(copy, path)  # the same bytes in another file
    found = compare(a, side)
    assert found.equal is None and f"`{path}` changed while it was compared" in found.verdict
    side = open_side(pair[1])
    path.unlink()
    found = compare(a, side)
    assert found.equal is None and f"`{path}` is gone" in found.verdict
    assert {r.verdict for r in found.tensors} == {UNREADABLE}


def test_one_that_cannot_be_read_beside_one_that_differs(tmp_path: Path) -> None:
    """A proven difference stands: not equal. Alone, the unreadable one is `could not tell`."""
    content: Content = {"x": ("F32", (4,), bytes(16)), "y": ("F32", (4,), bytes(16))}
    a = write_small_hf(tmp_path / "a", {"architectures": ["Unheard"]}, content)
    other = put(content, "x", array(content, "x") + 1)
    for name, held in (("same", content), ("other", other)):
        b = write_small_hf(tmp_path / name, {"architectures": ["Unheard"]}, held)
        side = open_side(b)
        stored = side.source.tensors["y"]
        blob = stored.blobs[0]._replace(offset=10**9)
        side.source.tensors["y"] = type(stored)("y", "F32", (4,), (blob,))
        found = compare(a, side)
        assert {r.name: r.verdict for r in found.tensors}["y"] == UNREADABLE
        if name == "same":
            assert (
                found.equal is None
                and found.verdict == "could not tell: 1 of 2 tensors could not be read: `y`"
            )
        else:
            assert found.equal is False and {r.name: r.verdict for r in found.tensors}["x"] == DIFFERS
            assert "1 could not be read" in found.verdict


BIG: Content = {f"w{i}": ("U8", (4 << 20,), bytes(4 << 20)) for i in range(16)}


@pytest.mark.parametrize("how", ["truncate", "replace", "remove", "overwrite"])
def test_while_it_is_read(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread strikes between two tensors, for real: the file is really cut under the reader."""
    a = write_small_hf(tmp_path / "a", {"architectures": ["Unheard"]}, BIG)
    b = write_small_hf(tmp_path / "b", {"architectures": ["Unheard"]}, BIG)
    path, begun, struck = b / "model.safetensors", threading.Event(), threading.Event()

    def strike() -> None:
        begun.wait(30)
        if how == "truncate":
            os.truncate(path, 20 << 20)
        elif how == "remove":
            path.unlink()
        elif how == "replace":
            shutil.copy(a / "model.safetensors", tmp_path / "new")
            os.truncate(tmp_path / "new", 1000)
            os.replace(tmp_path / "new", path)
        else:
            with open(path, "r+b") as file:
                file.seek(40 << 20)
                file.write(b"x")
        struck.set()

    screen = screening.screen

    def slower(*args: Any) -> Any:
        out = screen(*args)
        begun.set()
        struck.wait(30)
        return out

    monkeypatch.setattr("convtools.equality.compare.screen", slower)
    thread = threading.Thread(target=strike)
    thread.start()
    found = compare(a, b, CompareOptions(workers=1))
    thread.join()
    assert (found.equal, found.exit_code) == (None, 2), found.verdict


def test_a_process_lives_through_a_file_that_shrinks(tmp_path: Path) -> None:
    """Again and again, from another process: always a verdict, never `equal` over what was not read."""
    a = write_small_hf(tmp_path / "a", {"architectures": ["Unheard"]}, BIG)
    b = write_small_hf(tmp_path / "b", {"architectures": ["Unheard"]}, BIG)
    path = b / "model.safetensors"
    whole = path.read_bytes()
    for delay in (0.0, 0.05, 0.2, 0.35):
        path.write_bytes(whole)
        command = [sys.executable, "-m", "convtools", "compare", str(a), str(b)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(delay)
        os.truncate(path, 1 << 20)
        out, err = process.communicate(timeout=60)
        assert process.returncode in (0, 2) and "Traceback" not in err, (process.returncode, out, err)
        # 0 only where it had ended before the cut, 2 whenever the cut came first
        assert process.returncode == 2 or "every byte the same" in out


def test_a_name_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    (root / "config.json").write_text("{}")
    write_safetensors(root / "model.safetensors", {"w": ("F32", (2,), np.zeros(2, "f4").tobytes())})
    assert compare(root, root).equal is True
    with pytest.raises(UsageError, match="give its folder"):
        compare(root / "config.json", root)
