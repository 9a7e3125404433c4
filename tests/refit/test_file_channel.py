"""The file channel: an engine that loads a directory; whatever fails, it serves one whole version or none."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from convtools.refit.errors import RefitError
from convtools.refit.plan import Tensor
from convtools.refit.sinks.checkpoint import version_of
from convtools.refit.sinks.http_json import parse_base
from convtools.refit.sinks.loaders import SGLangLoader, SocketLoader, loader_of
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sinks.reload import ReloadSink
from convtools.refit.sync import WeightSync
from tests.refit.engines import Tensors, model, refill, versions_in
from tests.refit.serving import http, serving

CONFIG = {"config.json": b'{"model_type": "none"}'}


class Engine:
    """Serves what it loaded last; fails when it is told to."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.at = 0
        self.calls: list[int] = []
        self.fail: set[int] = set()
        """Calls that fail, after everything was loaded."""
        self.says: int | None = None
        """The version that it claims in place of its own."""

    def load(self, directory: Path, version: int) -> None:
        self.calls.append(version)
        if len(self.calls) in self.fail:
            raise RefitError("it does not fit the GPU")
        self.tensors = load_file(directory / "model.safetensors")
        self.at = version

    def version(self) -> int | None:
        return self.at if self.says is None else self.says

    def fingerprints(self, tensors: Sequence[Tensor]) -> list[bytes] | None:
        return None


def pushing(source: Tensors, dst: Path, engine: Any) -> WeightSync:
    return WeightSync(source, [ReloadSink(dst, CONFIG, engine, fsync=False)], bucket_bytes=4096)


def on_disk(dst: Path) -> set[float]:
    return versions_in(load_file(dst / "model.safetensors"))


def test_each_push_is_loaded(dst: Path) -> None:
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        for version in (1, 2, 5):
            refill(source, version)
            report = sync.push(version)
            assert (report.sinks[0].version, report.sinks[0].state) == (version, "clean")
            assert versions_in(engine.tensors) == on_disk(dst) == {version}
            assert json.loads((dst / "convtools_refit.json").read_text())["version"] == version
        assert engine.calls == [1, 2, 5]
        seen = sync.verify()
        assert seen.equal and set(seen.weaker[os.fspath(dst)]) == set(source)
        assert all("cannot tell what it holds" in why for why in seen.weaker[os.fspath(dst)].values())
    assert os.listdir(dst.parent) == [dst.name]


def test_a_function_will_do(dst: Path) -> None:
    calls: list[tuple[Path, int]] = []
    with pushing(model(1), dst, lambda directory, version: calls.append((directory, version))) as sync:
        assert sync.push(4).version == 4
    assert calls == [(dst, 4)]
    assert ReloadSink(dst, CONFIG, lambda *_: None).receiver.version == 4


def test_a_load_that_fails_brings_the_old_directory_back(dst: Path) -> None:
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        sync.push(1)
        engine.fail = {2}
        refill(source, 2)
        with pytest.raises(RefitError, match="does not fit the GPU"):
            sync.push(2)
        assert engine.calls == [1, 2, 1]
        assert versions_in(engine.tensors) == on_disk(dst) == {1}
        assert (version_of(dst), engine.at) == (1, 1)
        assert os.listdir(dst.parent) == [dst.name]
        assert sync.push(2).sinks[0].state == "clean"
        assert versions_in(engine.tensors) == {2}


def test_an_engine_that_loads_neither_is_poisoned_until_a_push_succeeds(dst: Path) -> None:
    source, engine = model(1), Engine()
    sink = ReloadSink(dst, CONFIG, engine, fsync=False)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        sync.push(1)
        engine.fail = {2, 3}
        refill(source, 2)
        with pytest.raises(RefitError, match=r"poisoned at version 1"):
            sync.push(2)
        assert (sink.receiver.state, sink.receiver.version, on_disk(dst)) == ("poisoned", 1, {1})
        refill(source, 3)
        assert sync.push(3).sinks[0].state == "clean"
        assert versions_in(engine.tensors) == on_disk(dst) == {3}
    assert os.listdir(dst.parent) == [dst.name]


def test_the_first_push_leaves_nothing_where_it_fails(dst: Path) -> None:
    engine = Engine()
    engine.fail = {1}
    sink = ReloadSink(dst, CONFIG, engine, fsync=False)
    with WeightSync(model(1), [sink], bucket_bytes=4096) as sync:
        with pytest.raises(RefitError, match="does not fit"):
            sync.push(1)
        assert not dst.exists() and os.listdir(dst.parent) == []
        assert (sink.receiver.state, engine.calls) == ("clean", [1])  # it says that it serves what it served
        assert sync.push(2).version == 2


def test_an_engine_that_says_another_version_is_not_believed(dst: Path) -> None:
    source, engine = model(1), Engine()
    sink = ReloadSink(dst, CONFIG, engine, fsync=False)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        sync.push(1)
        engine.says = 1
        refill(source, 2)
        with pytest.raises(RefitError, match="serves another version") as caught:
            sync.push(2)
        assert "expected: 2" in str(caught.value) and "found: 1" in str(caught.value)
        assert (sink.receiver.state, sink.receiver.version, on_disk(dst)) == ("clean", 1, {1})


def test_an_engine_that_holds_other_bytes_is_not_believed(dst: Path, tmp_path: Path) -> None:
    """One bit, in one tensor, after the load."""
    source = model(1)
    with serving(model(0), tmp_path / "e") as engine:

        class Flips(SocketLoader):
            flip = False

            def load(self, directory: Path, version: int) -> None:
                super().load(directory, version)
                if self.flip and version == 2:
                    engine.tensors["head"].view("u1")[5] ^= 1

        loader = Flips(LocalSink(tmp_path / "e"))
        with pushing(source, dst, loader) as sync:
            sync.push(1)
            weaker = sync.verify().weaker[os.fspath(dst)]
            assert all("fingerprint was compared" in why for why in weaker.values())
            loader.flip = True
            refill(source, 2)
            with pytest.raises(RefitError, match="serves other weights") as caught:
                sync.push(2)
            assert "`head`" in str(caught.value) and "`layers" not in str(caught.value)
            assert versions_in(engine.tensors) == on_disk(dst) == {1}
            assert engine.receiver.version == 1


@pytest.mark.parametrize("loaded", [False, True])
def test_a_push_that_was_killed_between_rename_and_load(dst: Path, loaded: bool) -> None:
    """What lies there is then not what the engine serves: a push that fails must not load it as that."""
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        sync.push(1)
        shutil.copytree(dst, dst.with_name("old"))
        refill(source, 2)
        sync.push(2)
    if not loaded:
        engine.load(dst.with_name("old"), 1)
    os.rename(dst.with_name("old"), dst.with_name(f".{dst.name}.before"))  # as the kill left it
    engine.fail = {len(engine.calls) + 1}
    refill(source, 3)
    sink = ReloadSink(dst, CONFIG, engine, fsync=False)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        with pytest.raises(RefitError, match="does not fit"):
            sync.push(3)
        at = 2 if loaded else 1
        assert (sink.receiver.state, sink.receiver.version, engine.at) == ("clean", at, at)
        assert versions_in(engine.tensors) == on_disk(dst) == {at}
    assert os.listdir(dst.parent) == [dst.name]


def test_a_directory_that_is_not_what_the_engine_serves_is_no_way_back(dst: Path) -> None:
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        sync.push(1)
    engine.at = 5  # somebody else's
    engine.fail = {2}
    sink = ReloadSink(dst, CONFIG, engine, fsync=False)
    with WeightSync(source, [sink], bucket_bytes=4096) as sync:
        with pytest.raises(RefitError, match="poisoned at version 5"):
            sync.push(6)
        assert engine.calls == [1, 6] and sync.push(7).sinks[0].state == "clean"


def test_files_of_a_push_that_was_killed_go(dst: Path) -> None:
    source, engine = model(1), Engine()
    with pushing(source, dst, engine) as sync:
        sync.push(1)
    left = dst.with_name(f".{dst.name}.before")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"old")
    with pushing(source, dst, engine) as sync:
        sync.push(2)
    assert os.listdir(dst.parent) == [dst.name]


def test_a_directory_that_no_push_wrote_is_not_replaced(dst: Path) -> None:
    dst.mkdir()
    (dst / "config.json").write_bytes(b"{}")
    (dst / "model.safetensors").write_bytes(b"mine")
    engine = Engine()
    with pushing(model(1), dst, engine) as sync, pytest.raises(RefitError, match="not written by a push"):
        sync.push(1)
    assert (dst / "model.safetensors").read_bytes() == b"mine" and engine.calls == []


def sglang(at: dict[str, Any], fail: set[str]) -> dict[str, Any]:
    """The two routes of SGLang, as its documentation has them."""

    def update(_: object, body: dict[str, Any]) -> tuple[int, object]:
        at["seen"].append(body)
        if body["weight_version"] in fail:
            return 400, {"success": False, "message": "Failed to load: \x1b[31mout of memory"}
        at["version"] = body["weight_version"]
        at["tensors"] = load_file(Path(body["model_path"]) / "model.safetensors")
        return 200, {"success": True, "message": "Succeeded"}

    info = lambda *_: (200, {"model_path": "m", "weight_version": at["version"]})  # noqa: E731
    return {"/model_info": info, "/update_weights_from_disk": update}


def test_sglang_is_told_over_http(dst: Path) -> None:
    at: dict[str, Any] = {"version": "default", "seen": [], "tensors": {}}
    source = model(1)
    with http(sglang(at, {"3"})) as url:
        loader = loader_of(url)
        assert isinstance(loader, SGLangLoader) and loader.version() is None
        with pushing(source, dst, loader) as sync:
            assert sync.push(2).version == 2
            assert versions_in(at["tensors"]) == {1}
            wanted = {"model_path": os.fspath(dst), "weight_version": "2", "flush_cache": True}
            assert at["seen"] == [wanted]
            refill(source, 3)
            with pytest.raises(RefitError, match="did not load the directory") as caught:
                sync.push(3)
            assert "out of memory" in str(caught.value) and "\x1b" not in str(caught.value)
            assert versions_in(at["tensors"]) == on_disk(dst) == {1}
            assert [body["weight_version"] for body in at["seen"]] == ["2", "3", "2"]
            assert loader.version() == 2
            refill(source, 4)
            sync.push(4)
            assert (versions_in(at["tensors"]), at["version"]) == ({4}, "4")
        assert SGLangLoader(parse_base(url)).version() == 4


def test_a_server_that_has_gone_leaves_the_old_directory(dst: Path) -> None:
    at: dict[str, Any] = {"version": "0", "seen": [], "tensors": {}}
    source = model(1)
    with http(sglang(at, set())) as url:
        sink = ReloadSink(dst, CONFIG, SGLangLoader(parse_base(url), timeout=2), fsync=False)
        with WeightSync(source, [sink], bucket_bytes=4096) as sync:
            sync.push(1)
    with (
        WeightSync(source, [sink], bucket_bytes=4096) as sync,
        pytest.raises(RefitError, match="no server answers"),
    ):
        sync.push(2)
    assert on_disk(dst) == {1} and np.array_equal(at["tensors"]["head"], source["head"])
