"""The SGLang sink against a server that keeps SGLang's contract, and against its faults."""

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from convtools.errors import UsageError
from convtools.refit.errors import RefitError
from convtools.refit.groups import group
from convtools.refit.plan import Tensor, make_plan
from convtools.refit.sinks import sglang_local
from convtools.refit.sinks.sglang import SGLangSink
from convtools.refit.sinks.sglang_local import Listener
from convtools.refit.sinks.sglang_names import touched, unwritten
from convtools.refit.sinks.sglang_payload import Placed, payload
from convtools.refit.sinks.sglang_server import Mark, read_mark
from convtools.refit.sinks.sglang_staging import Layout, SharedStaging, new_owner
from convtools.refit.sync import WeightSync
from tests.refit.sglang_server import SHAPES, FakeSGLang

Weights = dict[str, np.ndarray[Any, Any]]
BUCKET = 1024


def left() -> list[str]:
    """Staging memory of sinks, of whoever."""
    return sorted(p.name for p in Path("/dev/shm").glob("convtools-sglang-*"))


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whose staging memory this test makes; in the end none of it is left."""
    made: list[str] = []
    init = SharedStaging.__init__

    def noted(self: SharedStaging, owner: str, nbytes: int) -> None:
        made.append(owner)
        init(self, owner, nbytes)

    monkeypatch.setattr(SharedStaging, "__init__", noted)
    yield made
    assert [name for name in left() for owner in made if owner in name] == []


@pytest.fixture
def server() -> Iterator[FakeSGLang]:
    made = FakeSGLang()
    yield made
    made.close()


def weights(seed: int) -> Weights:
    made = np.random.default_rng(seed)
    return {name: made.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}


def raw(of: Weights) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in of.items()}


def sync(server: FakeSGLang, source: Any, timeout: float = 10.0, **options: Any) -> WeightSync:
    sink = SGLangSink(server.url, timeout=timeout, **options)
    return WeightSync(source, [sink], bucket_bytes=BUCKET, timeout=timeout)


def test_a_push(server: FakeSGLang, owners: list[str]) -> None:
    source = weights(1)
    with sync(server, source, name="engine") as one:
        report = one.push(7)
        assert one.verify().equal
        again = one.push(8)
        assert len(owners) == 1 and f"convtools-sglang-{owners[0]}" in left()  # the same memory
    assert server.weights == raw(source) and server.version == "8"
    assert not server.paused and not server.session
    assert (report.version, report.sinks[0].state, report.sinks[0].mode) == (7, "clean", "quarantine")
    assert report.sinks[0].flushed and again.sinks[0].flushed


def test_the_calls_and_their_order(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        one.push(7)
    posts = [(p, b) for p, b in server.calls if p != "/weights_checker"]
    loads = [b for p, b in posts if p == "/update_weights_from_tensor"]
    order = [p.strip("/") for p, _ in posts]
    assert order == [
        "begin_weight_update", "pause_generation", "update_weight_version",
        *["update_weights_from_tensor"] * len(loads), "end_weight_update", "continue_generation",
    ]  # fmt: skip
    assert [b["weight_version"] for b in loads] == [None] * (len(loads) - 1) + ["7"]
    assert [b["flush_cache"] for b in loads] == [False] * (len(loads) - 1) + [True]
    assert len(loads) > 4
    smallest = server.loads[-1]
    assert sorted(n for names in server.loads[:-1] for n in names) == sorted(SHAPES)
    assert smallest == ["model.layers.0.input_layernorm.weight"]  # once more, for its flush and version


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        ("drain", ["begin_weight_update", "pause_generation retract"]),
        ("abort", ["pause_generation abort", "pause_generation retract"]),
        ("keep", ["pause_generation retract"]),
    ],
)
def test_requests_in_flight(server: FakeSGLang, policy: Any, calls: list[str]) -> None:
    sink = SGLangSink(server.url)
    with WeightSync(weights(1), [sink], bucket_bytes=BUCKET, in_flight=policy) as one:
        one.push(1)
    posts = [f"{p.strip('/')} {b.get('mode', '')}".strip() for p, b in server.calls]
    assert posts[1 : 1 + len(calls)] == calls


def test_a_push_without_flush_says_so(server: FakeSGLang) -> None:
    with WeightSync(weights(1), [SGLangSink(server.url)], bucket_bytes=BUCKET, flush=False) as one:
        report = one.push(1)
    assert "flush" in report.unchecked and not report.sinks[0].flushed
    assert not any(b.get("flush_cache") for _, b in server.calls)


def test_every_rank_reads_its_own(server: FakeSGLang) -> None:
    wide, source = FakeSGLang(tp=3), weights(2)
    with sync(wide, source, tp=3) as one:
        one.push(1)  # the server compares what its ranks read, each from a name that only it may use
    assert wide.weights == raw(source)
    wide.close()


def test_an_update_that_a_dead_trainer_left_is_ended(server: FakeSGLang) -> None:
    server.session = server.paused = True
    server.version = Mark("updating", 4, 5, new_owner(), int(time.time()) + 3600).text
    source = weights(3)
    with sync(server, source) as one:
        report = one.push(5)
    assert report.version == 5 and server.version == "5" and not server.paused and not server.session
    assert server.weights == raw(source)
    order = [p for p in server.paths if "weight_update" in p or "pause" in p]
    assert order == [
        "/begin_weight_update", "/pause_generation", "/begin_weight_update", "/end_weight_update",
        "/begin_weight_update", "/end_weight_update",
    ]  # fmt: skip


def test_a_live_trainer_is_not_disturbed(server: FakeSGLang) -> None:
    owner = new_owner()
    other = SharedStaging(owner, 256)
    server.version = Mark("updating", 4, 5, owner, int(time.time()) + 3600).text
    with sync(server, weights(3)) as one, pytest.raises(RefitError, match="another trainer's push"):
        one.push(5)
    assert server.paths == []
    server.version = Mark("updating", 4, 5, owner, int(time.time()) - 1).text  # its lease is over
    with sync(server, weights(3)) as one:
        assert one.push(5).version == 5
    other.close()


def test_a_version_of_another_trainer_is_found_out(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        one.push(1)
        with sync(server, weights(2)) as two:
            two.push(4)
        with pytest.raises(RefitError, match="another trainer"):
            one.push(5)
        assert server.weights == raw(weights(2)) and server.version == "4" and not server.paused
        one.push(5, force=True)
    assert server.version == "5"


def test_a_late_trainer_changes_nothing(server: FakeSGLang) -> None:
    """While it loads, another takes over: what it sends afterwards is not sent."""
    taken: list[int] = []

    def takes_over(path: str, number: int) -> None:
        if path == "/update_weights_from_tensor" and not taken:
            taken.append(number)
            server.version = Mark("updating", 0, 9, new_owner(), int(time.time()) + 60).text

    server.fault = takes_over
    with sync(server, weights(1)) as one, pytest.raises(RefitError, match="took the server over"):
        one.push(1)
    assert len(server.loads) == 1 and server.paused and " 0 to 9 " in server.version
    assert server.paths[-1] == "/update_weights_from_tensor"


def test_a_restarted_server_is_pushed_to_afresh(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        one.push(1)
        server.start()
        assert one.push(2).version == 2
    assert server.weights == raw(weights(1))


FAULTS = ("drop", "error", "refuse", "garbage", "long", "moved", "late")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_every_request(kind: str) -> None:
    """Never a mix that is served, never a version without its weights; and the next push heals."""
    source, runs = weights(1), 0
    for at in range(1, 100):
        server = FakeSGLang()
        old, new = dict(server.weights), raw(source)
        server.fault = lambda path, number, at=at: kind if number == at else None  # type: ignore[misc]
        with sync(server, source, timeout=5.0) as one:
            try:
                report = one.push(3)
            except RefitError:
                report = None
            what = (kind, at, server.paused, server.version, server.weights == old)
            if report is not None:
                assert (server.weights, server.version, server.paused) == (new, "3", False), what
            elif server.weights != new:
                assert server.version != "3", what
                assert server.paused or (server.weights == old and server.version in ("default", "0")), what
            server.fault = None
            one.push(4)
            assert (server.weights, server.version) == (new, "4") and not server.paused, what
            assert not server.session
        server.close()
        runs += 1
        if report is not None and not server.faulted:
            break
    assert 20 < runs < 99


@pytest.mark.parametrize("kind", ["hang", "drip"])
def test_every_wait_has_a_deadline(server: FakeSGLang, kind: str) -> None:
    source = weights(1)
    with sync(server, source, timeout=0.4) as one:
        server.fault = lambda path, number: kind if path == "/update_weights_from_tensor" else None
        began = time.monotonic()
        with pytest.raises(RefitError, match=r"not answered|did not answer"):
            one.push(1)
        assert time.monotonic() - began < 5
        assert server.paused
        server.fault = None
        time.sleep(0.1)
        one.push(2)
    assert server.weights == raw(source) and not server.paused


def test_a_flush_that_fails_fails_the_push(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        server.fault = lambda path, number: "refuse" if server.calls and _is_last(server, path) else None
        with pytest.raises(RefitError, match="poisoned at version 0"):
            one.push(1)
        assert server.paused and server.version.startswith("convtools poisoned 0 to 1")
        server.fault = None
        one.push(1)
    assert not server.paused and server.version == "1"


def _is_last(server: FakeSGLang, path: str) -> bool:
    loaded = {name for names in server.loads for name in names}
    return path == "/update_weights_from_tensor" and len(loaded) == len(SHAPES)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"dp_size": 2}, "data-parallel"),
        ({"pp_size": 2}, "stages"),
        ({"nnodes": 2}, "nodes"),
        ({"version": "0.6.1"}, "SGLang 0.6.1, not tested"),
        ({"quantization": "fp8"}, "quantised"),
        ({"torchao_config": "int4wo-128"}, "quantised"),
        ({"weight_cache_mode": "client"}, "shared with other servers"),
        ({"disaggregation_mode": "decode"}, "one half"),
        ({"tp_size": "2"}, "no SGLang server"),
    ],
)
def test_servers_that_are_refused(info: dict[str, Any], words: str) -> None:
    server = FakeSGLang(**info)
    with sync(server, weights(1)) as one, pytest.raises(RefitError, match=words):
        one.push(1)
    assert server.paths == []
    server.close()


def test_another_version_may_be_allowed() -> None:
    server = FakeSGLang(version="0.6.1")
    with sync(server, weights(1), untested=True) as one:
        one.push(1)
    assert server.weights == raw(weights(1))
    server.close()


def test_other_ranks_than_wanted(server: FakeSGLang) -> None:
    with sync(server, weights(1), tp=2) as one, pytest.raises(RefitError, match="1 TP ranks, not 2"):
        one.push(1)


def test_the_key() -> None:
    server = FakeSGLang(key="k3y")
    with sync(server, weights(1)) as one, pytest.raises(RefitError, match="401"):
        one.push(1)
    with sync(server, weights(1), api_key="k3y") as one:
        one.push(1)
    assert server.weights == raw(weights(1))
    server.close()


def test_what_the_server_rounds_is_not_called_stale() -> None:
    source = weights(1)
    for dtype, words in (("float32", "check() looks at"), ("bfloat16", "as F32"), ("auto", "as F32")):
        server = FakeSGLang(dtype=dtype)
        with sync(server, source) as one:
            one.push(1)
            assert words in one.verify().weaker[server.url]["model.norm.weight"]
        server.close()


def test_another_machine_is_refused_before_it_is_asked() -> None:
    with WeightSync(weights(1), [SGLangSink("http://192.0.2.1:30000")]) as one:
        began = time.monotonic()
        with pytest.raises(RefitError, match="is another machine"):
            one.push(1)
        assert time.monotonic() - began < 5


def test_another_user_is_refused(server: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    with sync(server, weights(1)) as one:
        monkeypatch.setattr(sglang_local, "Listener", lambda uid, inode: Listener(uid + (1 << 20), inode))
        with pytest.raises(RefitError, match="runs as another user"):
            one.push(1)
    assert server.paths == []


def test_the_server_of_this_test_listens(server: FakeSGLang) -> None:
    port = int(server.url.rpartition(":")[2])
    (found,) = sglang_local._listeners(Path("/proc/net/tcp"), port)
    assert found.uid == os.getuid()
    assert [s.st_ino for s in sglang_local._shm_of({found.inode})] == [os.stat("/dev/shm").st_ino]


def test_nobody_listens() -> None:
    server = FakeSGLang()
    server.close()
    with sync(server, weights(1)) as one, pytest.raises(RefitError, match="was not answered"):
        one.push(1)


def test_names_that_the_server_does_not_know(server: FakeSGLang) -> None:
    source = weights(1)
    source["model.layers.0.strange.weight"] = source.pop("model.layers.0.self_attn.o_proj.weight")
    with sync(server, source) as one, pytest.raises(RefitError) as failed:
        one.push(1)
    assert "unknown: `model.layers.0.strange.weight`" in str(failed.value)
    assert "never written: `model.layers.0.self_attn.o_proj.weight`" in str(failed.value)
    assert server.loads == [] and not server.paused
    with sync(server, source, unknown="allow") as one:
        one.push(1)
        told = one.verify().weaker[server.url]
    assert "no parameter of a name like this" in told["model.layers.0.strange.weight"]


def test_mtp_layers_without_a_draft_model(server: FakeSGLang) -> None:
    source = weights(1) | {"mtp.layers.0.norm.weight": np.ones(4, "f4")}
    with sync(server, source) as one, pytest.raises(RefitError, match="no draft model"):
        one.push(1)
    with sync(server, source, mtp="ignore") as one:
        one.push(1)
        assert "ignored by the server" in one.verify().weaker[server.url]["mtp.layers.0.norm.weight"]


def test_a_weight_version_of_other_making(server: FakeSGLang) -> None:
    server.version = "release-candidate"
    with sync(server, weights(1)) as one, pytest.raises(RefitError, match="no step of a trainer"):
        one.push(1)


def test_the_bound_on_staging_memory(server: FakeSGLang) -> None:
    with sync(server, weights(1), staging_bytes=2048) as one, pytest.raises(RefitError) as failed:
        one.push(1)
    needed = int(str(failed.value).split("SGLangSink to ")[1].split(",")[0])
    assert server.paths == [] and "raise staging_bytes" in str(failed.value)
    sink = SGLangSink(server.url, staging_bytes=needed)
    with WeightSync(weights(1), [sink], bucket_bytes=BUCKET) as one:
        one.push(1)
        assert sink.staging_bytes == needed
    assert sink.staging_bytes == 0


def test_the_self_test(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        with pytest.raises(UsageError, match="does not serve the source's weights") as caught:
            one.check()  # SGLang gives nothing back, and nothing was pushed yet
        assert caught.value.fix == "push first, or give check a version"
        one.push(1)
        found = one.check()
        assert found.ok and len(found.canaries) == len(SHAPES), found
        assert found.digests == {server.url: 8} and found.outputs == (server.url,)
        server.ignored = ("model.layers.0.mlp.down_proj.weight",)
        found = one.check()
    assert any("down_proj.weight` did not change" in fault for fault in found.faults)
    assert not server.paused and server.weights == raw(weights(1))


def test_real_torch_reads_what_we_write() -> None:
    """In a process of its own: torch starts a helper for its shared memory, which ends with it."""
    staging = SharedStaging(new_owner(), 1024)
    values = np.arange(6, dtype="f4").tobytes()
    staging.slice(256, len(values))[:] = values
    tensors = [Placed(Tensor("a.b", "F32", (2, 3)), 256), Placed(Tensor("h", "BF16", ()), 256)]
    with staging.names(1) as names:
        text = payload(names[0], 1024, tensors)
        run = subprocess.run(
            [sys.executable, "-c", _READ_BY_TORCH, text], capture_output=True, text=True, timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    staging.close()
    assert run.stdout.splitlines() == [
        "a.b torch.Size([2, 3]) torch.float32 [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
        "h torch.Size([]) torch.bfloat16 0.0",
    ], run.stderr


_READ_BY_TORCH = """
import base64, pickle, sys, types
name = "sglang.srt.weight_sync.tensor_bucket"
for at in ("sglang", "sglang.srt", "sglang.srt.weight_sync", name):
    sys.modules[at] = types.ModuleType(at)
sys.modules[name].FlattenedTensorMetadata = type("FlattenedTensorMetadata", (), {})
found = pickle.loads(base64.b64decode(sys.argv[1]))
for m in found["metadata"]:
    t = found["flattened_tensor"][m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
    print(m.name, t.shape, t.dtype, t.tolist())
"""


def test_no_code_is_named_in_a_payload() -> None:
    import pickletools

    text = payload("x", 256, [Placed(Tensor("os.system", "BF16", (1 << 40, 3)), 0)])
    named = {arg for op, arg, _ in pickletools.genops(base64.b64decode(text)) if op.name == "GLOBAL"}
    assert named == {
        "_codecs encode", "torch Tensor", "torch Size", "torch uint8", "torch bfloat16",
        "torch.storage UntypedStorage", "torch.multiprocessing.reductions rebuild_tensor",
        "torch.multiprocessing.reductions rebuild_typed_storage",
        "torch.multiprocessing.reductions rebuild_storage_filename",
        "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata",
    }  # fmt: skip


NAMES = st.sampled_from(
    [f"l.{i}.{n}.weight" for i in range(3) for n in ("q_proj", "k_proj", "norm", "up_proj", "gate_proj")]
    + [f"l.0.experts.{i}.down_proj.weight" for i in range(4)]
)


@given(st.lists(st.tuples(NAMES, st.integers(0, 900)), unique_by=lambda t: t[0], min_size=1), st.booleans())
@settings(deadline=None, max_examples=200)
def test_groups_are_loaded_once_and_never_share_a_place(sizes: list[tuple[str, int]], each: bool) -> None:
    tensors = [Tensor(name, "F32", (n,)) for name, n in sizes]
    plan = make_plan(tensors, 512)
    groups = group(tensors, "each" if each else "layer")
    layout = Layout(plan, groups)
    live: dict[int, tuple[int, int]] = {}
    loaded: list[int] = []
    for index, bucket in enumerate(plan.buckets):
        for part in bucket.parts:
            begin = layout.at[part.tensor]
            mine = (begin, begin + tensors[part.tensor].nbytes)
            for other, (start, end) in live.items():
                assert other == part.tensor or mine[1] <= start or end <= mine[0]
            live[part.tensor] = mine
            assert mine[1] <= layout.nbytes
        for done in layout.loads.get(index, ()):
            assert all(tensors[i].nbytes == 0 or i in live for i in done.tensors)
            loaded += done.tensors
            for i in done.tensors:
                if layout.last is None or i not in layout.last.tensors:
                    live.pop(i, None)
    assert sorted(loaded) == sorted(i for g in groups if g.nbytes for i in g.tensors)


def test_a_killed_trainer_leaves_nothing_for_long(server: FakeSGLang) -> None:
    code = (
        "import os, signal\n"
        "from convtools.refit.sinks.sglang_staging import SharedStaging, new_owner\n"
        "s = SharedStaging(new_owner(), 4096)\n"
        "print(s.owner, flush=True)\n"
        "with s.names(2): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, stdout=subprocess.PIPE
    )
    owner = run.stdout.decode().strip()
    names = {f"convtools-sglang-{owner}{end}" for end in ("", ".1", ".2")}
    assert len(owner) == 12 and names <= set(left())
    SharedStaging(new_owner(), 256).close()
    assert not names & set(left())


def test_a_lease_that_runs_out(server: FakeSGLang) -> None:
    slow = iter([2.0])

    def fault(path: str, number: int) -> None:
        if path == "/update_weights_from_tensor":
            time.sleep(next(slow, 0))

    server.fault = fault
    sink = SGLangSink(server.url)
    with WeightSync(weights(1), [sink], bucket_bytes=BUCKET, lease=0.3) as one:
        with pytest.raises(RefitError, match=r"lease of 0.3 s ran out"):
            one.push(1)
        assert server.paused and server.version.startswith("convtools poisoned 0 to 1")
        assert one.push(1).version == 1
    assert server.weights == raw(weights(1)) and not server.paused


def test_two_trainers_at_once() -> None:
    """One of them goes on, or none; never do two, and what is served is whole."""
    for _ in range(10):
        server, done = FakeSGLang(), []
        before = raw({name: np.zeros(shape, "f4") for name, shape in SHAPES.items()})
        start = threading.Barrier(2)

        def push(
            seed: int, server: FakeSGLang = server, done: list[int] = done, start: threading.Barrier = start
        ) -> None:
            with sync(server, weights(seed)) as one:
                start.wait()
                try:
                    done.append(one.push(seed).version)
                except RefitError:
                    return

        threads = [threading.Thread(target=push, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if not server.paused:
            whole = {"default": before, "0": before, "1": raw(weights(1)), "2": raw(weights(2))}
            assert server.weights == whole[server.version], (server.version, done)
        with sync(server, weights(3)) as one:
            one.push(7)
        assert (server.version, server.paused, server.session) == ("7", False, False)
        assert server.weights == raw(weights(3))
        server.close()


def test_descriptors_are_given_back(server: FakeSGLang) -> None:
    def count() -> int:
        """Memory only: the server's sockets are of this process, too."""
        links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return sum(link.startswith(("/dev/shm/", "/memfd:")) for link in links)

    with sync(server, weights(1)) as one:
        one.push(1)
    before = count()
    for version in (2, 3, 4):
        with sync(server, weights(1)) as one:
            one.push(version)
    assert count() <= before


@pytest.mark.parametrize(
    "text", ["9" * 5000, "-1", "1.5", "", None, 7, "\u0663", "convtools updating 1 to 2"]
)
def test_versions_that_are_none(text: Any) -> None:
    with pytest.raises(RefitError, match="no step of a trainer"):
        read_mark(text)


def test_threads_end(server: FakeSGLang) -> None:
    with sync(server, weights(1)) as one:
        one.push(1)
    assert "convtools-sglang" not in {t.name for t in threading.enumerate()}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("backbone.layers.0.mixer.A_log", "model.layers.0.mixer.A"),
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.layers.3.mixer.experts.7.up_proj.weight", "model.layers.3.mixer.experts.w13_weight"),
        ("backbone.layers.3.mixer.experts.7.down_proj.weight", "model.layers.3.mixer.experts.w2_weight"),
        (
            "backbone.layers.3.mixer.shared_experts.up_proj.weight",
            "model.layers.3.mixer.shared_experts.up_proj.weight",
        ),
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.w13_weight"),
        ("model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.w13_weight"),
        ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.qkv_proj.bias"),
        (
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight",
        ),
        ("lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_where_a_tensor_lies_in_sglang(name: str, kept: str) -> None:
    assert touched(name, {kept, "model.norm.weight"}) == (kept,)
    assert touched(name, {"model.norm.weight"}) == ()
    assert unwritten([name], {kept, "model.norm.weight"}) == ["model.norm.weight"]


def test_what_belongs_together() -> None:
    names = [
        "l.0.self_attn.q_a_proj.weight", "l.0.self_attn.q_b_proj.weight", "l.0.mlp.experts.0.up_proj.weight",
        "l.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", "l.0.mlp.experts.10.down_proj.weight_scale",
        "l.0.mlp.shared_experts.up_proj.weight", "l.1.mlp.experts.0.up_proj.weight",
    ]  # fmt: skip
    tensors = [Tensor(name, "BF16", (4,)) for name in names]
    assert [g.tensors for g in group(tensors)] == [(0, 3), (1,), (2, 4), (5,), (6,)]
    assert [g.tensors for g in group(tensors, "each")] == [(0, 3), (1,), (2,), (4,), (5,), (6,)]
