"""`convtools refit`, `refit check` and `compare` with a running engine, as a user types them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.plan import Tensor
from tests.commands import ROOT, command, refused, run
from tests.engine.checkpoints import LONG, altered, make
from tests.equality.equal_pairs import NEMOTRON, live, write_hf, write_megatron
from tests.refit.serving import Serving, http, serving
from tests.tensors import Content

EMBEDDING = "backbone.embeddings.weight"


def finite(dtype: str, data: bytes) -> bytes:
    if dtype == "F32":
        return np.nan_to_num(np.frombuffer(data, "<f4"), nan=0.5).tobytes()
    bits = np.frombuffer(data, "<u2")
    return np.where(bits & 0x7F80 == 0x7F80, bits & 0x8000, bits).tobytes()


FINITE: Content = {
    name: (dtype, shape, finite(dtype, data)) for name, (dtype, shape, data) in NEMOTRON.content().items()
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.convert.small import write_small_hf

    return write_small_hf(tmp_path_factory.mktemp("refit") / "hf", NEMOTRON.config, FINITE)


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    return write_megatron(NEMOTRON, hf, hf.parent / "mg", "torch_dist")


def zeros(where: Path, **more: Any) -> Any:
    return serving({n: t.zero_() for n, t in live(FINITE).items()}, where, **more)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Serving]:
    with zeros(tmp_path / "e") as found:
        yield found


def holds(engine: Serving) -> bool:
    import torch

    wanted = live(FINITE)
    return all(torch.equal(t, wanted[n]) for n, t in engine.tensors.items())


def test_a_push_in_words(hf: Path, engine: Serving) -> None:
    done = run("refit", hf, engine.url)
    assert done.returncode == 0, done.stderr
    assert engine.receiver.version == 1 and holds(engine)
    labels = ["pushed", "tensors", "time", "of it", "serves", "left out"]
    lines = done.stdout.splitlines()  # a fact a line, however long, where no terminal is
    assert len(lines) >= 5 and all(line.startswith(label) for line, label in zip(lines, labels, strict=False))
    said = re.sub(r"\s+", " ", done.stdout)
    for words in (
        f"pushed {hf} as version 1", "63, 40.41 kB in 1 bucket; staging memory 16.78 MB",
        "a matter of round trips", "gather 0.",
        "pack 0.", "wait 0.", "prepare and commit 0.", f"{engine.url}: version 1, clean;",
    ):  # fmt: skip
        assert words in said, (words, said)


def test_a_push_as_json_from_a_megatron_checkpoint(megatron: Path, engine: Serving) -> None:
    for version in (1, 2):
        done = run("refit", megatron, engine.url, "--json", "--bucket", "4KiB")
        report = json.loads(done.stdout)
        assert done.returncode == 0 and holds(engine)
        assert (report["version"], engine.receiver.version) == (version, version)
    assert report["nbytes"] == sum(len(data) for _, _, data in FINITE.values()) and report["tensors"] == 63
    assert report["staging_bytes"] == 4 * 4096 and report["buckets"] > 10
    assert report["sinks"][0] | {"consume_seconds": 0} == {
        "name": engine.url, "state": "clean", "version": 2, "mode": "shadow", "undo_bytes": report["nbytes"],
        "consume_seconds": 0, "flushed": False,
    }  # fmt: skip
    parts = ["gather_seconds", "pack_seconds", "wait_seconds", "commit_seconds"]
    assert all(0 < report[part] < report["seconds"] for part in parts)
    speed = report["nbytes"] / report["seconds"] / 1e9
    assert report["gigabytes_per_second"] == pytest.approx(speed)
    assert report["share_of_memcpy"] == pytest.approx(speed / report["memcpy_gigabytes_per_second"])
    assert 0.1 < report["memcpy_gigabytes_per_second"] < 1000 and not [
        text for text in report["unchecked"] if not text.startswith("flush: ")
    ]


def test_the_version_is_not_lowered_but_by_force(hf: Path, engine: Serving) -> None:
    assert run("refit", hf, engine.url, "--version", "7").returncode == 0
    refused(run("refit", hf, engine.url, "--version", "3"), "never lowered", "clean at version 7")
    assert engine.receiver.version == 7
    assert run("refit", hf, engine.url, "--version", "3", "--force").returncode == 0
    assert engine.receiver.version == 3


def test_all_engines_or_none(hf: Path, engine: Serving, tmp_path: Path) -> None:
    fewer = {n: t for n, t in live(FINITE).items() if n != EMBEDDING}
    with zeros(tmp_path / "f", version=4) as second, serving(fewer, tmp_path / "g") as other:
        done = run("refit", hf, engine.url, second.url, other.url)
        refused(done, "the engine has other tensors", f"the engine has no tensor of that name: `{EMBEDDING}`")
        assert (engine.receiver.version, second.receiver.version) == (0, 4) and not holds(engine)
        assert run("refit", hf, engine.url, second.url).returncode == 0
        assert engine.receiver.version == second.receiver.version == 5
        assert holds(engine) and holds(second)


def test_nan_is_refused_unless_it_is_wanted(tmp_path: Path, engine: Serving) -> None:
    hf = write_hf(NEMOTRON, tmp_path / "hf")
    refused(run("refit", hf, engine.url), f"`{EMBEDDING}` holds NaN or infinity", "version 0")
    done = run("refit", hf, engine.url, "--allow-nonfinite", "--no-fingerprints", "--no-flush", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["unchecked"] == [
        "finite",
        "fingerprints",
        "flush",
    ]


def test_requests_in_flight(hf: Path, engine: Serving) -> None:
    """This engine can only drain."""
    refused(run("refit", hf, engine.url, "--in-flight", "abort"), "cannot do that with requests in flight")
    assert run("refit", hf, engine.url, "--in-flight", "drain").returncode == 0


def test_a_trace(hf: Path, engine: Serving, tmp_path: Path) -> None:
    trace = tmp_path / "push.json"
    done = run("refit", hf, engine.url, "--trace", trace, "--bucket", "8KiB")
    assert done.returncode == 0, done.stderr
    spans = [event for event in json.loads(trace.read_text()) if event["ph"] == "X"]
    assert {"push"} <= {event["name"] for event in spans} and all(event["dur"] >= 0 for event in spans)
    refused(run("refit", hf, engine.url, "--trace", trace), "no trace can be written: File exists", code=2)
    assert engine.receiver.version == 1


def test_a_progress_bar_on_a_terminal_only(hf: Path, engine: Serving) -> None:
    import pty

    assert run("refit", hf, engine.url).stderr == ""
    ours, theirs = pty.openpty()
    args = command("refit", hf, engine.url, "--bucket", "4KiB")
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT, env=env) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # the terminal is closed
            pass
        assert process.wait(60) == 0
    os.close(ours)
    assert b"kB" in shown and b"\x1b" in shown


def test_a_folder_called_check(hf: Path, engine: Serving, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "check")
    env = {"PYTHONPATH": str(ROOT)}
    pushed = run("refit", "./check", engine.url, cwd=tmp_path, env=env)
    assert pushed.returncode == 0, pushed.stderr
    assert holds(engine) and engine.receiver.version == 1
    tested = run("refit", "check", engine.url, "--source", "check", cwd=tmp_path, env=env)
    assert tested.returncode == 0 and "the folder `check` is pushed as ./check" in tested.stderr
    assert engine.receiver.version == 1


@pytest.mark.parametrize("applier", [ShadowApplier, InPlaceApplier])
def test_check_of_a_sound_engine(hf: Path, tmp_path: Path, applier: Any) -> None:
    with serving(live(FINITE), tmp_path / "e", applier=applier, version=6) as engine:
        done = run("refit", "check", engine.url, "--source", hf)
        assert done.returncode == 0, done
        said = re.sub(r"\s+", " ", done.stdout)
        assert "pushed twice nothing changed" in said and "in 24 tensors, one of each kind" in said
        assert said.strip().endswith("verdict ok")
        engine.receiver.origin = str(hf)
        report = json.loads(run("refit", "check", engine.url, "--json").stdout)
        assert report["source"] == str(hf)
        assert report["ok"] is True and len(report["canaries"]) == 24 and report["faults"] == []
        assert (engine.receiver.version, engine.receiver.state) == (6, "clean") and holds(engine)


class Deaf(ShadowApplier):
    """Takes every bucket, and serves what it always served of one tensor."""

    def pending(self, tensor: Tensor) -> Any:
        return self.serves(tensor) if tensor.name == EMBEDDING else super().pending(tensor)


def test_check_finds_a_tensor_that_is_not_taken_over(hf: Path, tmp_path: Path) -> None:
    with serving(live(FINITE), tmp_path / "e", applier=Deaf) as engine:
        done = run("refit", "check", engine.url, "--source", hf)
        assert done.returncode == 1 and "NOT OK" in done.stdout and EMBEDDING in done.stdout, done
        report = json.loads(run("refit", "check", engine.url, "--source", hf, "--json").stdout)
        assert report["ok"] is False and EMBEDDING in report["faults"][0]


def test_check_refuses_to_push_what_is_not_served(hf: Path, engine: Serving) -> None:
    done = run("refit", "check", engine.url, "--source", hf)
    refused(done, "could not be tested", "does not serve the weights", code=2)
    refused(run("refit", "check", engine.url), "does not say what it was started from", code=2)
    told = run("refit", "check", engine.url, "--json")
    assert told.returncode == 2 and json.loads(told.stdout)["ok"] is None
    assert not holds(engine) and engine.receiver.version == 0


def test_no_engine_there(hf: Path, tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}", "http://127.0.0.1:1", "engine:8000"):
        for more in ([], ["--version", "7"]):
            refused(run("refit", hf, url, *more), "engine" if "unix" in url else "", code=2)
        refused(run("refit", "check", url, "--source", hf), "could not be tested", code=2)
    refused(run("refit", tmp_path / "none", f"unix://{tmp_path}"), "there is no folder", code=2)


def told(*args: object) -> dict[str, Any]:
    """What a command that fails says on stdout: one object, beside the words on stderr."""
    done = run(*args, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit"] == done.returncode != 0 and found["error"].keys() == {
        "what", "where", "expected", "found", "fix"
    }  # fmt: skip
    what = found["error"]["what"].split("\n")[0]
    assert done.stderr.startswith("error: ") and what in done.stderr, done.stderr
    return found


def test_exit_codes_and_errors_as_json(hf: Path, engine: Serving, tmp_path: Path) -> None:
    """1: the push was refused, and the state of the engines is told; 2: it could not begin."""
    fewer = {n: t for n, t in live(FINITE).items() if n != EMBEDDING}
    with serving(fewer, tmp_path / "f") as other:
        found = told("refit", hf, engine.url, other.url)
        assert found["exit"] == 1 and "the engine has other tensors" in found["error"]["what"]
        assert f"`{EMBEDDING}`" in str(found["error"])
        assert f"`{engine.url}` clean at version 0" in found["error"]["found"]
    for args, what in (
        (("refit", hf, f"unix://{tmp_path}/none"), "there is no directory"),
        (("refit", "nothere", engine.url), "there is no folder `nothere`"),
        (("refit", hf), "Missing argument 'URL...'"),
        (("refit", hf, engine.url, "--bucket", "many"), "is not a size"),
        (("refit", hf, engine.url, "--nothing"), "No such option"),
        (("refit", "check", engine.url), "does not say what it was started from"),
        (("refit", "check", engine.url, "--timeout", "0"), "is not above 0"),
    ):
        found = told(*args)
        assert found["exit"] == 2 and what in found["error"]["what"], found
    assert found.get("ok") is None and told("refit", "check", engine.url)["ok"] is None
    assert told("refit", "nothere", engine.url)["error"]["expected"] == (
        "a checkpoint's folder, or org/name[@revision] on the Hub"  # a manifest holds no weights
    )
    assert engine.receiver.version == 0 and not holds(engine)


def test_slips_of_the_pen(hf: Path, engine: Serving, tmp_path: Path) -> None:
    refused(run("refit", "chek", engine.url), f"convtools refit check {engine.url}", code=2)
    refused(run("refit", engine.url, hf), "the checkpoint comes first", code=2)
    for url in (f"file://{tmp_path}/x", f"file://{tmp_path}/x?reload={engine.url}"):
        refused(run("refit", "check", url, "--source", hf), "cannot be tested this way", code=2)
    done = run("refit", hf, "foo://x")
    refused(done, "unix:///DIR, http://host:port, sglang+http://host:port, file:///DIR", code=2)
    assert "vllm" not in done.stderr
    refused(run("inspect", "http://127.0.0.1:8"), "`http://127.0.0.1:8` is a URL", "`refit check`", code=2)
    refused(run("inspect", f"file://{hf}"), "give its path", code=2)
    refused(run("compare", hf, hf, "--timeout", "3"), "--timeout is for a running engine", code=2)


def test_a_bucket_is_not_quietly_another(hf: Path, engine: Serving) -> None:
    done = run("refit", hf, engine.url, "--bucket", "100")
    assert done.returncode == 2 and "less than a bucket has, 256" in done.stderr, done
    done = run("refit", hf, engine.url, "--bucket", "1MB", "--json")
    assert done.returncode == 0 and "note: buckets of 1000192 bytes" in done.stderr
    assert json.loads(done.stdout)["staging_bytes"] == 4 * 1000192


def test_one_engine_under_two_urls(hf: Path, engine: Serving, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(engine.url.removeprefix("unix://"))
    with http({"/refit": {"directory": engine.url.removeprefix("unix://")}, "/info": {}}) as url:
        for other in (url, f"unix://{tmp_path}/link", f"{engine.url}/"):
            refused(run("refit", hf, engine.url, other), "is given twice", engine.url, other, code=2)
        for other in (f"{url}/", url.replace("127.0.0.1", "localhost")):
            refused(run("refit", hf, url, other), "is given twice", code=2)
    assert engine.receiver.version == 0 and not holds(engine)


def test_another_architecture(hf: Path, engine: Serving, tmp_path: Path) -> None:
    """Tensors of the same names and shapes: without a look at config.json, it would be served."""
    (tmp_path / "m").mkdir()
    config = {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    engine.receiver.origin = str(tmp_path / "m")
    words = ("is another architecture", "`OtherForCausalLM`", "`NemotronHForCausalLM`")
    refused(run("refit", hf, engine.url), *words, code=2)
    assert engine.receiver.version == 0 and not holds(engine)
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"model_type": "nemotron_h"}))
    assert run("refit", hf, engine.url).returncode == 0 and holds(engine)


@pytest.mark.parametrize("words", [("refit",), ("refit", "check"), ("compare",)])
def test_an_engine_that_is_dead_or_hangs(hf: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    import socket

    where = tmp_path / "e"
    with serving(live(FINITE), where):
        key = (where / "refit.key").read_bytes()
    (where / "refit.key").write_bytes(key)
    (where / "refit.key").chmod(0o600)
    args = ["--source", hf] if "check" in words else []
    src = [] if "check" in words else [hf]
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind(str(where / "refit.sock"))
        dead = run(*words, *src, f"unix://{where}", *args)
        refused(dead, "no engine listens: Connection refused", "start it again", code=2)
        listens.listen()
        hangs = run(*words, *src, f"unix://{where}", *args, "--timeout", "0.5")
        refused(hangs, "the peer did not answer in time", "it hangs, is stopped", code=2)


def test_into_directories(hf: Path, engine: Serving, tmp_path: Path) -> None:
    plain, cut = f"file://{tmp_path}/plain", f"file://{tmp_path}/cut?to=torch_dist&tp=2"
    done = run("refit", hf, engine.url, plain, f"{cut}&make_vocab_size_divisible_by=8")
    assert done.returncode == 0, done.stderr
    for side in (tmp_path / "plain", tmp_path / "cut"):
        assert run("compare", hf, side).returncode == 0
    loads = f"file://{tmp_path}/loads?reload={engine.url}"
    assert run("refit", hf, loads, "--version", "8").returncode == 0
    assert engine.receiver.version == 8


def test_compare_with_an_engine(hf: Path, megatron: Path, engine: Serving, tmp_path: Path) -> None:
    done = run("compare", hf, engine.url)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("not equal: 6"), done
    assert run("refit", megatron, engine.url).returncode == 0
    page = tmp_path / "page.html"
    for a, b in ((hf, engine.url), (engine.url, megatron), (engine.url, engine.url)):
        done = run("compare", a, b, "--html", page, "--overwrite")
        assert done.returncode == 0 and "equal by fingerprint" in done.stdout, done
    assert "Equal by fingerprint" in page.read_text()
    report = json.loads(run("compare", hf, engine.url, "--json").stdout)
    assert (report["equal"], report["b_format"]) == (True, "engine")
    assert report["b"] == f"{engine.url} at version 1"
    engine.receiver._state = "poisoned"
    refused(run("compare", hf, engine.url), "could not tell", "is poisoned", code=2)
    told = json.loads(run("compare", hf, engine.url, "--json").stdout)
    assert told["equal"] is None and "poisoned" in told["verdict"]
    refused(run("compare", hf, f"unix://{tmp_path}"), "no engine listens", code=2)
    refused(run("compare", hf, engine.url, "--ulp", "1"), "values cannot be compared", code=2)


def test_over_http_an_engine_says_where_it_listens(hf: Path, engine: Serving, tmp_path: Path) -> None:
    pages = {
        "/refit": {"directory": engine.url.removeprefix("unix://")},
        "/info": {"model": str(hf), "vocab": 8},
        "/generate": {"ids": [[1, 2]], "logprobs": [[-0.5, -0.25]]},
    }
    with http(pages) as url:
        refused(run("refit", "check", url), "does not serve the weights of", str(hf), code=2)
        assert run("refit", hf, url).returncode == 0 and holds(engine)
        done = run("refit", "check", url)
        assert done.returncode == 0 and re.search(r"answers +compared", done.stdout), done
        assert run("compare", url, hf).returncode == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*", "ignore::FutureWarning:transformers.*")
def test_the_reference_engine(tmp_path: Path) -> None:
    """From the shell alone, and its tokens are those of an engine that was started on the new weights."""
    from convtools.engine.process import started

    first = make(tmp_path / "a", "LlamaForCausalLM", 1, LONG)
    second = altered(first, tmp_path / "b")
    prompt = [3, 7, 11, 19, 2]
    with started(first) as engine:
        assert run("refit", "check", engine.url).returncode == 0
        before = engine.generate(prompt, max_new_tokens=12)
        assert run("compare", second, engine.url).returncode == 1
        done = run("refit", second, engine.url)
        assert done.returncode == 0 and "version 1, clean, caches emptied" in re.sub(r"\s+", " ", done.stdout)
        assert run("compare", second, engine.url).returncode == 0
        refused(run("refit", "check", engine.url), "does not serve the weights of", "--source", code=2)
        assert run("refit", "check", engine.url, "--source", second).returncode == 0
        after = engine.generate(prompt, max_new_tokens=12)
    with started(second) as fresh:
        wanted = fresh.generate(prompt, max_new_tokens=12)
    assert after["ids"] == wanted["ids"] != before["ids"] and after["logprobs"] == wanted["logprobs"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e9", "0", "-1"])
def test_seconds_that_no_clock_has(hf: Path, engine: Serving, seconds: str) -> None:
    for words in (("refit", hf, engine.url), ("refit", "check", engine.url)):
        done = run(*words, "--timeout", seconds)
        assert done.returncode == 2 and "--timeout" in done.stderr and "defect" not in done.stderr, done
    assert engine.receiver.version == 0


def test_urls_that_lead_to_nobody(hf: Path, engine: Serving) -> None:
    refused(run("refit", hf, "http://127.0.0.1:0"), "names no port", code=2)
    refused(run("compare", f"file://{hf}", engine.url), "is a directory, and no engine", code=2)
