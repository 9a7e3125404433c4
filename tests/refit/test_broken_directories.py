"""Directories: two that want the same one, steps that fail, and what is told of them."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools import staging
from convtools.refit.channels.local_memory import Server, dial
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.sinks.checkpoint import CheckpointSink, version_of
from convtools.refit.sinks.side_files import NOTE
from convtools.refit.sync import WeightSync
from tests.refit.engines import Engine, model, refill

CONFIG = {"config.json": b"{}"}


def test_of_engines_that_start_together_one_listens_with_its_own_key(tmp_path: Path) -> None:
    for turn in range(20):
        where, made, failed = tmp_path / str(turn), list[Server](), list[BaseException]()
        together = threading.Barrier(3)

        def start(where: Path, made: list[Server], failed: list[BaseException], at: Any) -> None:
            at.wait()
            try:
                made.append(Server(Engine().receiver, where))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=start, args=(where, made, failed, together)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert [type(e) for e in failed] == [PeerError] * 2 and len(made) == 1
            dial(where, 2).close()
        finally:
            for server in made:
                server.close()


@pytest.mark.parametrize("kind", ["file", "proc"])
def test_a_directory_that_cannot_be_is_a_refusal(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PeerError, match="no engine can listen there"):
        Server(Engine().receiver, tmp_path / "file" if kind == "file" else "/proc/none")


def test_a_directory_that_another_push_wrote_is_not_lowered(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    one, two = CheckpointSink(dst, CONFIG, fsync=False), CheckpointSink(dst, CONFIG, fsync=False)
    with (
        WeightSync(model(5), [one], bucket_bytes=4096) as first,
        WeightSync(model(3), [two], bucket_bytes=4096) as second,
    ):
        first.push(5)
        with pytest.raises(RefitError, match="another push wrote the directory meanwhile"):
            second.push(3)
        assert version_of(dst) == 5 and first.verify().equal
        first.push(6)
        assert version_of(dst) == 6
    with WeightSync(model(7), [CheckpointSink(dst, CONFIG, fsync=False)], bucket_bytes=4096) as third:
        third.push(7)


def test_a_directory_that_was_published_and_may_not_last_is_no_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, source = tmp_path / "out", model(1)
    sink = CheckpointSink(dst, CONFIG)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        sync.push(1)
        refill(source, 2)
        real = staging.sync

        def sync_all_but_the_last(path: Path) -> None:
            if path == dst.parent:
                raise OSError(5, "Input/output error")
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(staging, "sync", sync_all_but_the_last)
            with pytest.raises(RefitError, match="poisoned at version 1"):
                sync.push(2)
        assert version_of(dst) == 2 and not sync.verify().equal
        sync.push(3)
        assert version_of(dst) == 3 and sync.verify().equal


def test_many_tensors_of_a_directory_are_verified_in_one_reading(tmp_path: Path) -> None:
    source = {f"l.{i}.w": np.full(4, i, "f4") for i in range(1000)}
    with WeightSync(source, [CheckpointSink(tmp_path / "o", CONFIG, fsync=False)], bucket_bytes=4096) as sync:
        sync.push(1)
        began = time.monotonic()
        assert sync.verify().equal
        assert time.monotonic() - began < 5
        changed = tmp_path / "o/model.safetensors"
        changed.write_bytes(changed.read_bytes()[:-1] + b"\1")
        assert sync.verify().differing == {str(tmp_path / "o"): ("l.999.w",)}


@pytest.mark.parametrize("note", [b"", b"[" * 60_000, b'{"version": -3}', b'{"version": 1e999}', b"7"])
def test_a_damaged_note_is_no_version(note: bytes, tmp_path: Path) -> None:
    (tmp_path / NOTE).write_bytes(note)
    assert version_of(tmp_path) == 0
