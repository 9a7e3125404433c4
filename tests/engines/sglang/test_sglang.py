"""Real SGLang: what a server serves after a push is what a server started on the new checkpoint serves.

SGLang runs in a virtual environment of its own, on stubs of its kernels (engines/sglang); we run in ours.
One server at a time: those that are compared with are asked once, at the start.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convtools.refit.errors import RefitError
from convtools.refit.sinks.sglang import SGLangSink
from convtools.refit.sinks.sglang_facts import _has_amx
from convtools.refit.sync import WeightSync
from tests.engines.sglang.serving import KEY, NEW_TOKENS, PROMPTS, PYTHON, ROOT, Server, Snapshot, serving

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

if not PYTHON.exists():
    pytest.skip(
        f"SGLang is not installed: no {PYTHON} (engines/sglang/install.sh, or CONVTOOLS_SGLANG_VENV)",
        allow_module_level=True,
    )

BUCKET = 64 << 10
MEANS = "parameters (64 bits of SHA-256 each)"
Models = dict[str, tuple[Path, Path]]
"""Two checkpoints of each kind."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from tests.engines.sglang.checkpoints import make

    root = tmp_path_factory.mktemp("models")
    return {kind: (make(root, kind, 1), make(root, kind, 2)) for kind in ("llama", "nemotron", "qwen3moe")}


def fresh(model: Path, log: Path, tp: int = 1) -> Snapshot:
    with serving(model, log, tp=tp) as server:
        return server.snapshot()


Run = subprocess.CompletedProcess[bytes]


def trainer(server: Server, model: Path, version: int, killed_at: int | None = None) -> Run:
    """A push from a process of its own."""
    command = [sys.executable, "-m", "tests.engines.sglang.trainer", str(model), server.url, KEY]
    command += [str(n) for n in (version, killed_at) if n is not None]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)


def pushed(server: Server, model: Path, version: int) -> None:
    run = trainer(server, model, version)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    assert run.stdout.split()[0] == b"%d" % version and run.stdout.split()[2:] == [b"clean", b"True"]


def sync(server: Server, source: Any, in_flight: Any = "drain", **options: Any) -> WeightSync:
    sink = SGLangSink(server.url, api_key=KEY, **options)
    return WeightSync(source, [sink], bucket_bytes=BUCKET, in_flight=in_flight)


def compared(server: Server, model: Path) -> subprocess.CompletedProcess[bytes]:
    """`convtools compare`, from a process that has pushed nothing."""
    command = [sys.executable, "-m", "convtools", "compare", str(model), server.url, "--json"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=120, env=os.environ | {"CONVTOOLS_ENGINE_KEY": KEY}
    )


def holds(server: Server, model: Path, other: Path) -> None:
    """By SGLang's digests of its own parameters: all of one checkpoint, and nothing of another."""
    run = compared(server, model)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["verdict"].startswith(f"equal by SGLang's digests of its own {MEANS}")
    assert {t["verdict"] for t in found["tensors"]} <= {"identical", "within tolerance"}
    run = compared(server, other)
    assert run.returncode == 1, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["verdict"].startswith(f"not equal: of SGLang's digests of its own {MEANS}")
    if _has_amx():  # then it may have packed what is no vector, and another digest is no proof
        return
    unequal = {t["name"] for t in found["tensors"] if t["verdict"] == "differs"}
    assert {t["name"] for t in found["tensors"]} - unequal <= {"backbone.layers.0.mixer.A_log"}


def there_and_back(server: Server, a: Path, b: Path, of_b: Snapshot) -> None:
    """A -> B -> A, each as a fresh server of it."""
    holds(server, a, b)
    of_a = server.snapshot()
    assert of_a.tokens != of_b.tokens
    equal = [n for n, v in of_a.checksums[0].items() if of_b.checksums[0][n] == v]
    assert equal == [], "a push of what is the same in both models shows nothing"
    pushed(server, b, 1)
    assert server.snapshot() == of_b and server.version() == "1"
    holds(server, b, a)
    pushed(server, a, 2)
    assert server.snapshot() == of_a and server.version() == "2"


class TestLlama:
    @pytest.fixture(scope="class")
    def of_b(self, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
        return fresh(models["llama"][1], tmp_path_factory.mktemp("logs") / "llama-b.log")

    @pytest.fixture(scope="class")
    def server(
        self, models: Models, of_b: Snapshot, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Server]:
        with serving(models["llama"][0], tmp_path_factory.mktemp("logs") / "llama.log") as made:
            yield made

    def test_there_and_back(self, server: Server, models: Models, of_b: Snapshot) -> None:
        there_and_back(server, *models["llama"], of_b)

    def test_the_self_test(self, server: Server, models: Models, of_b: Snapshot) -> None:
        with sync(server, str(models["llama"][1])) as one:
            one.push(server.step() + 1)
            found = one.check()
            assert found.ok and found.identity and found.faults == ()
            assert found.digests == {server.url: len(of_b.checksums[0])} and len(found.canaries) == 12
            assert one.verify().equal
        assert server.snapshot() == of_b

    def test_one_bit_is_named(self, server: Server, models: Models) -> None:
        """Of one tensor of many; the parameter is that tensor alone, or the three that it lies with."""
        import torch
        from safetensors.torch import load_file

        attention = "model.layers.1.self_attn."
        for name, named in (("o_proj", ("o_proj",)), ("k_proj", ("k_proj", "q_proj", "v_proj"))):
            weights = load_file(models["llama"][1] / "model.safetensors")
            weights[f"{attention}{name}.weight"].view(torch.uint8)[0, 0] ^= 1
            with sync(server, weights) as one:
                one.push(server.step() + 1)
            found = json.loads(compared(server, models["llama"][1]).stdout)
            differing = [t["name"] for t in found["tensors"] if t["verdict"] == "differs"]
            assert (differing, found["equal"]) == ([f"{attention}{n}.weight" for n in named], False)
        pushed(server, models["llama"][1], server.step() + 1)
        assert compared(server, models["llama"][1]).returncode == 0

    @pytest.mark.parametrize("killed_at", [1, 3])
    def test_a_killed_trainer(self, server: Server, models: Models, of_b: Snapshot, killed_at: int) -> None:
        """SIGKILL in the middle: nothing is answered until another trainer has pushed all."""
        at = server.step()
        run = trainer(server, models["llama"][0], at + 1, killed_at)
        assert run.returncode == -signal.SIGKILL
        assert server.version().startswith(f"convtools updating {at} to {at + 1} by ")
        with pytest.raises(TimeoutError):
            server.generate(PROMPTS[:1], 1, timeout=3)
        pushed(server, models["llama"][1], at + 1)
        assert server.snapshot() == of_b and server.version() == str(at + 1)
        assert not list(Path("/dev/shm").glob("convtools-sglang-*"))

    @pytest.mark.parametrize("policy", ["drain", "abort", "keep"])
    def test_requests_in_flight(self, server: Server, models: Models, of_b: Snapshot, policy: str) -> None:
        at, answers, length = server.step(), [], 400
        asking = threading.Thread(target=lambda: answers.extend(server.generate(PROMPTS[:1], length)))
        with sync(server, str(models["llama"][1]), policy) as one:
            one._fleet.links[0].refresh(one.plan, one._ring, 60, False)  # what takes time is behind us
            asking.start()
            time.sleep(0.4)
            one.push(at + 1)
            asking.join(60)
        (answer,) = answers
        finish, spans = answer["meta_info"]["finish_reason"], answer["meta_info"]["weight_versions"]
        said = len(answer["output_ids"])
        match policy:
            case "drain":
                assert finish["type"] == "length" and said == length
                assert [s["version"] for s in spans] == [str(at)]
            case "abort":
                assert finish["type"] == "abort" and said < length
            case "keep":
                assert finish["type"] == "length" and said == length
                assert [spans[0]["version"], spans[-1]["version"]] == [str(at), str(at + 1)]
                assert spans[0]["start"] < spans[0]["end"] <= spans[-1]["start"] < spans[-1]["end"] == length
        assert server.snapshot() == of_b

    def test_requests_that_do_not_end_in_time(self, server: Server, models: Models, of_b: Snapshot) -> None:
        """The push is refused, nothing was touched, and the request ends as if nothing had been."""
        at, answers = server.step() + 1, []
        pushed(server, models["llama"][1], at)
        asking = threading.Thread(target=lambda: answers.extend(server.generate(PROMPTS[:1], 480)))
        with sync(server, str(models["llama"][0]), drain=0.1) as one:
            one._fleet.links[0].refresh(one.plan, one._ring, 60, False)
            asking.start()
            time.sleep(0.3)
            with pytest.raises(RefitError, match=f"clean at version {at}"):
                one.push(at + 1)
            asking.join(60)
            assert len(answers[0]["output_ids"]) == 480
            assert server.snapshot() == of_b and server.version() == str(at)
        pushed(server, models["llama"][1], at + 1)
        assert server.snapshot() == of_b

    def test_what_is_refused(self, server: Server, models: Models, of_b: Snapshot) -> None:
        """Before anything is sent: a wrong key, another model, layers that the server would skip."""
        wrong = SGLangSink(server.url, api_key="wrong")
        with WeightSync(str(models["llama"][1]), [wrong]) as one, pytest.raises(RefitError, match="401"):
            one.push(99)
        with (
            sync(server, str(models["qwen3moe"][1])) as one,
            pytest.raises(RefitError, match="other tensors"),
        ):
            one.push(99)
        import torch
        from safetensors.torch import load_file

        source = load_file(models["llama"][1] / "model.safetensors") | {"mtp.norm.weight": torch.ones(4)}
        with sync(server, source) as one, pytest.raises(RefitError, match="no draft model"):
            one.push(99)
        assert server.snapshot() == of_b


class TestNemotron:
    """Mamba-2, attention and a latent mixture of experts."""

    @pytest.fixture(scope="class")
    def of_b(self, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
        return fresh(models["nemotron"][1], tmp_path_factory.mktemp("logs") / "nemotron-b.log")

    @pytest.fixture(scope="class")
    def server(
        self, models: Models, of_b: Snapshot, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Server]:
        with serving(models["nemotron"][0], tmp_path_factory.mktemp("logs") / "nemotron.log") as made:
            yield made

    def test_there_and_back(self, server: Server, models: Models, of_b: Snapshot) -> None:
        there_and_back(server, *models["nemotron"], of_b)

    def test_the_self_test(self, server: Server, models: Models, of_b: Snapshot) -> None:
        """`A` is made anew from A_log each time; the F32 router is rounded, and said to be."""
        with sync(server, str(models["nemotron"][1])) as one:
            one.push(server.step() + 1)
            found = one.check()
            assert found.ok, found.faults
            assert found.digests == {server.url: len(of_b.checksums[0])}
            weaker = found.weaker[server.url]
        assert "may be rounded" in weaker["backbone.layers.1.mixer.gate.weight"]
        assert "mixer.A`, whose digest" in weaker["backbone.layers.0.mixer.A_log"]
        assert server.snapshot() == of_b

    def test_tokens_are_those_of_transformers(self, server: Server, models: Models, of_b: Snapshot) -> None:
        """Two engines that are wrong alike are equal: here is another to compare with.

        Greedy to greedy, given what was said before. In bfloat16 a router's near ties move a log-probability
        of this model by up to 0.5 against float32, within transformers itself: hence the few exceptions.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from tests.engines.sglang.checkpoints import config_of

        model = AutoModelForCausalLM.from_pretrained(
            models["nemotron"][1], config=config_of("nemotron"), dtype=torch.bfloat16
        )
        exact = 0
        for prompt, tokens, logprobs in zip(PROMPTS, of_b.tokens, of_b.logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            said = logits.float().log_softmax(-1)
            theirs = said.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (said.max(-1).values - theirs).max() < 0.3
            assert (theirs - torch.tensor(logprobs)).abs().mean() < 0.1
            exact += int((said.argmax(-1) == torch.tensor(tokens)).sum())
        assert exact >= len(PROMPTS) * NEW_TOKENS - 4


def test_two_ranks(models: Models, tmp_path: Path) -> None:
    """Each rank reads its own payload, and cuts what is its own; experts, too."""
    a, b = models["qwen3moe"]
    of_b = fresh(b, tmp_path / "b.log", tp=2)
    assert len(of_b.checksums) == 2 and of_b.checksums[0] != of_b.checksums[1]
    with serving(a, tmp_path / "a.log", tp=2) as server:
        there_and_back(server, a, b, of_b)
        with sync(server, str(a), tp=2) as one:
            one.push(server.step() + 1)
            assert one.check().ok
        with sync(server, str(a), tp=1) as one, pytest.raises(RefitError, match="2 TP ranks, not 1"):
            one.push(9)


def test_nothing_is_left() -> None:
    left = [p for p in Path("/dev/shm").glob("convtools-sglang-*") if p.stat().st_uid == os.getuid()]
    assert left == []
