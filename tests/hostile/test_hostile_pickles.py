"""Pickles and torch files made to run code, to mislead or to exhaust: nothing runs, and each is refused."""

import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from convtools.errors import CheckpointError, UnsafePickle
from convtools.stores.dcp import read_metadata
from convtools.stores.pickles import load_pickle, plain
from convtools.stores.stand_ins import Inert, InertType, OrderedState, stand_in
from convtools.stores.torch_frames import tensor_frame
from convtools.stores.torch_zip import TensorRef, read_archive, read_tensor_item

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "oracle"
DIST = FIXTURES / "nemotron_nomtp_core016/tp2pp1ep1/torch_dist/iter_0000001"
LEGACY = FIXTURES / "nemotron_mtp/tp2pp2ep1/torch_legacy/iter_0000001/mp_rank_00_000/model_optim_rng.pt"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A reader that takes long fails instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError("took over 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that only code run by a pickle would make."""
    return tmp_path / "canary"


@pytest.fixture
def gadget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third-party package with what a pickle needs to run code."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "convtools_gadget.py").write_text(
        textwrap.dedent("""
            import pathlib

            def touch(path):
                pathlib.Path(path).touch()

            class Toucher:
                def __init__(self, path=None):
                    if path:
                        touch(path)
                def __new__(cls, path=None, **more):
                    if path or more:
                        touch(path or more["path"])
                    return object.__new__(cls)
                def __setstate__(self, state):
                    touch(state)
                def append(self, item):
                    touch(item)
                def __setitem__(self, key, value):
                    touch(value)
                def add(self, item):
                    touch(item)
        """)
    )
    monkeypatch.syspath_prepend(str(folder))


# ---- a little assembler


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def stacked(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def op(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


CALLS: dict[str, Callable[[str, str, bytes], bytes]] = {
    "GLOBAL REDUCE": lambda m, n, arg: named(m, n) + arg + b"\x85R",
    "STACK_GLOBAL REDUCE": lambda m, n, arg: stacked(m, n) + arg + b"\x85R",
    "in a memo": lambda m, n, arg: named(m, n) + b"q\x000" + b"h\x00" + arg + b"\x85R",
    "INST": lambda m, n, arg: b"(" + arg + f"i{m}\n{n}\n".encode(),
    "OBJ": lambda m, n, arg: b"(" + named(m, n) + arg + b"o",
    "as a key": lambda m, n, arg: b"}" + named(m, n) + arg + b"\x85RNs",
    "in a frame": lambda m, n, arg: (
        b"\x95" + struct.pack("<Q", len(stacked(m, n) + arg) + 3) + stacked(m, n) + arg + b"\x85R"
    ),
}
CLASS_CALLS: dict[str, Callable[[str, str, bytes], bytes]] = {
    "NEWOBJ": lambda m, n, arg: named(m, n) + arg + b"\x85\x81",
    "NEWOBJ_EX": lambda m, n, arg: named(m, n) + b")}" + text("path") + arg + b"s\x92",
    "BUILD": lambda m, n, arg: named(m, n) + b")\x81" + arg + b"b",
    "APPEND": lambda m, n, arg: named(m, n) + b")\x81" + arg + b"a",
    "APPENDS": lambda m, n, arg: named(m, n) + b")\x81(" + arg + arg + b"e",
    "SETITEM": lambda m, n, arg: named(m, n) + b")\x81N" + arg + b"s",
    "SETITEMS": lambda m, n, arg: named(m, n) + b")\x81(N" + arg + b"u",
    "ADDITEMS": lambda m, n, arg: named(m, n) + b")\x81(" + arg + b"\x90",
}
TOUCH = "open({!r}, 'w').close()"
HARMFUL: dict[str, Callable[[Path], tuple[str, str, bytes]]] = {
    "os.system": lambda c: ("os", "system", text(f"touch {c}")),
    "posix.system": lambda c: ("posix", "system", text(f"touch {c}")),
    "builtins.eval": lambda c: ("builtins", "eval", text(TOUCH.format(str(c)))),
    "builtins.exec": lambda c: ("builtins", "exec", text(TOUCH.format(str(c)))),
    "__builtin__.eval": lambda c: ("__builtin__", "eval", text(TOUCH.format(str(c)))),
    "subprocess.Popen": lambda c: ("subprocess", "Popen", b"]" + text("touch") + b"a" + text(str(c)) + b"a"),
    "subprocess.getoutput": lambda c: ("commands", "getoutput", text(f"touch {c}")),
    "timeit.timeit": lambda c: ("timeit", "timeit", text(TOUCH.format(str(c)))),
    "os.mkdir": lambda c: ("os", "mkdir", text(str(c))),
}


def archive(data: bytes, **more: bytes) -> bytes:
    """A torch.save file by Python's own zip writer."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little", **more}.items():
            file.writestr(f"archive/{name.replace('__', '/')}", content)
    return out.getvalue()


def from_metadata(data: bytes, path: Path) -> Any:
    (path / ".metadata").write_bytes(data)
    return read_metadata(path)


def from_common(data: bytes, path: Path) -> Any:
    (path / "common.pt").write_bytes(archive(data))
    return read_archive(path / "common.pt").value


def from_object(data: bytes, path: Path) -> Any:
    item = archive(data)
    (path / "__0_0.distcp").write_bytes(b"x" * 33 + item + b"y" * 99)
    return read_archive(path / "__0_0.distcp", 33, len(item)).value


def from_tensor_item(data: bytes, path: Path) -> Any:
    item = archive(data, data__0=bytes(8))
    (path / "__0_0.distcp").write_bytes(item)
    return read_tensor_item(path / "__0_0.distcp", 0, len(item))


READERS = [from_metadata, from_common, from_object, from_tensor_item]


# ---- code


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("name", HARMFUL)
def test_code_of_the_standard_library_is_refused(
    name: str, form: str, read: Callable[[bytes, Path], Any], tmp_path: Path, canary: Path
) -> None:
    data = op(CALLS[form](*HARMFUL[name](canary)))
    with pytest.raises(UnsafePickle, match=r"nothing of it was run") as caught:
        read(data, tmp_path)
    module = {"__builtin__": "builtins", "posix": "posix"}.get(name.split(".")[0], name.split(".")[0])
    assert f"`{module}.{name.split('.')[1]}`" in str(caught.value)
    assert str(tmp_path) in str(caught.value.where)
    assert not canary.exists()


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "__builtin__.eval", "os.mkdir"])
def test_these_pickles_would_run(name: str, form: str, canary: Path) -> None:
    """Or else the test above would prove nothing."""
    pickle.loads(op(CALLS[form](*HARMFUL[name](canary)), 2))
    assert canary.exists()


@pytest.mark.parametrize("form", {**CALLS, **CLASS_CALLS})
@pytest.mark.parametrize("read", [*READERS, None])
@pytest.mark.usefixtures("gadget")
def test_code_of_others_does_not_run(
    form: str, read: Callable[[bytes, Path], Any] | None, tmp_path: Path, canary: Path
) -> None:
    data = op({**CALLS, **CLASS_CALLS}[form]("convtools_gadget", "Toucher", text(str(canary))))
    if read is None:
        pickle.loads(data)
        assert canary.exists()  # it would run
        return
    if read in (from_metadata, from_tensor_item):
        with pytest.raises(CheckpointError):
            read(data, tmp_path)
    else:
        value = read(data, tmp_path)
        inert = next(iter(value)) if isinstance(value, dict) else value
        assert isinstance(inert, Inert) and type(inert).path == "convtools_gadget.Toucher"
        plain(value)
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "torch.hub.load",
        "torch.storage._load_from_bytes",
        "numpy.load",
        "megatron.x.y",
        "os2.system",
    ],
)
def test_functions_of_others_become_inert(name: str) -> None:
    module, _, function = name.rpartition(".")
    value = load_pickle(op(named(module, function) + text("x") + b"\x85R"), where="here")
    assert isinstance(value, Inert) and type(value).path == name and value.args == ("x",)


REFUSED = [
    "os.path.join", "nt.system", "sys.exit", "sys.modules", "shutil.rmtree", "importlib.import_module",
    "runpy.run_path", "socket.socket", "ctypes.CDLL", "operator.attrgetter", "functools.partial",
    "builtins.getattr", "builtins.__import__", "builtins.open", "builtins.compile", "builtins.setattr",
    "pickle.loads", "codecs.decode", "_codecs.decode", "types.FunctionType", "types.CodeType",
    "signal.signal", "signal.raise_signal", "enum.sys.exit", "pathlib.os.system", "argparse._sys.exit",
    "datetime.sys.modules", "collections.abc.Callable", "collections.namedtuple", "webbrowser.open",
    "pty.spawn", "multiprocessing.Process", "threading.Thread", "code.interact", "pdb.run",
    "builtins.type.mro", "copyreg.add_extension", "asyncio.run", "platform.popen",
    "logging.config.x", "_posixsubprocess.fork_exec",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_harmful_names_are_refused(name: str) -> None:
    module, _, function = name.partition(".")
    for call in (named, stacked):
        with pytest.raises(UnsafePickle) as caught:
            load_pickle(op(call(module, function)), where="here")
        assert f"`{name}`" in str(caught.value) and "here" in str(caught.value)


def test_a_harmful_name_is_refused_wherever_it_is_nested() -> None:
    deep = pickle.dumps([{"a": ({"b": [1]},)}])
    assert load_pickle(deep, where="here") == [{"a": ({"b": [1]},)}]
    with pytest.raises(UnsafePickle):
        load_pickle(op(b"](}" + text("a") + b"]" + named("os", "system") + b"asNe"), where="here")


@pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_extension_opcodes_are_refused(code: bytes) -> None:
    with pytest.raises(UnsafePickle, match=r"extension opcode(?s:.*)byte 3"):
        load_pickle(op(b"N" + code), where="here")


# ---- changing what the reader is made of


CLASS = named("third.party", "Thing")
CHANGES = {
    "a class, by state": CLASS + b"}" + text("path") + text("x") + b"sb",
    "a class, by slots": CLASS + b"N}" + text("path") + text("x") + b"s\x86b",
    "OrderedDict, by slots": named("collections", "OrderedDict")
    + b"N}"
    + text("path")
    + text("x")
    + b"s\x86b",
    "OrderedDict's method": named("collections", "OrderedDict") + b"N}" + text("update") + CLASS + b"s\x86b",
    "torch.Size": named("torch", "Size") + b"N}" + text("path") + text("x") + b"s\x86b",
    "a class, by item": CLASS + text("path") + text("x") + b"s",
    "a class, by append": CLASS + b"Na",
    "a set's class": b"\x8fN}" + text("__class__") + CLASS + b"s\x86b",
    "a dict's class": b"}N}" + text("__class__") + CLASS + b"s\x86b",
    "a string": text("x") + b"}b",
    "a number called": b"K\x01)R",
    "a string called": text("os.system") + b")R",
    "an inert object called": CLASS + b")R)R",
    "a string made new": text("x") + b")\x81",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_pickle_cannot_change_the_reader(change: str) -> None:
    before = dict(Inert.__dict__), dict(OrderedState.__dict__), stand_in("third.party.Thing").path
    with pytest.raises(CheckpointError, match="here"):
        load_pickle(op(CHANGES[change]), where="here")
    assert before == (dict(Inert.__dict__), dict(OrderedState.__dict__), stand_in("third.party.Thing").path)


@pytest.mark.parametrize("function", ["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"])
def test_a_change_to_a_function_ends_with_its_pickle(tmp_path: Path, function: str) -> None:
    body = named("torch._utils", function) + b"N}" + text("__defaults__") + b"(K\x01K\x02ts" + b"\x86b"
    (tmp_path / "bad.pt").write_bytes(archive(op(body)))
    read_archive(tmp_path / "bad.pt")
    torch.save(torch.ones(2), tmp_path / "w.pt")
    assert isinstance(read_archive(tmp_path / "w.pt").value, TensorRef)


def test_a_tensors_place_cannot_be_changed(tmp_path: Path) -> None:
    """What a pickle says about where bytes lie is checked; a state set afterwards would not be."""
    path = tmp_path / "w.pt"
    torch.save(torch.ones(2), path)
    with zipfile.ZipFile(path) as file:
        data = file.read("w/data.pkl")
    for state in (
        b"}" + text("offset") + b"K\x07s",
        b"N}" + text("offset") + b"K\x07s\x86",
        b"(K\x01K\x02t",
        b"]",
    ):
        (tmp_path / "bad.pt").write_bytes(archive(data[:-1] + state + b"b.", data__0=bytes(8)))
        with pytest.raises(CheckpointError):
            read_archive(tmp_path / "bad.pt")


def test_stand_ins_are_classes_that_cannot_be_changed() -> None:
    thing = stand_in("third.party.Thing")
    assert isinstance(thing, InertType)
    with pytest.raises(TypeError):
        thing.path = "x"
    assert "\x1b" not in repr(stand_in("a\x1b[2Jb"))


# ---- exhaustion


def wide(count: int) -> bytes:
    return b"](" + b"K\x01" * count + b"eq\x000"


LATIN1 = text("latin1")
HUGE = b"\x8a\x05\x00\x00\x00\x00\x01"
BOMBS = {
    "LONG_BINPUT": b"Nr\xf0\xff\xff\xff",
    "LONG_BINPUT of 100 million": b"Nr\x00\xe1\xf5\x05",
    "PUT": b"Np4000000000\n",
    "PUT of many digits": b"Np" + b"9" * 5000 + b"\n",
    "PUT of a sign": b"Np-1\n",
    "BINUNICODE8": b"\x8d" + struct.pack("<Q", 1 << 62),
    "BINBYTES8": b"\x8e" + struct.pack("<Q", 1 << 40),
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 1 << 36),
    "BINUNICODE": b"X\xff\xff\xff\xff",
    "BINSTRING": b"T\xff\xff\xff\x7f",
    "FRAME": b"\x95" + struct.pack("<Q", 1 << 50) + b"N",
    "LONG4": b"\x8b" + struct.pack("<I", 10_000_000) + b"\x01" * 10_000_000,
    "INT of many digits": b"I" + b"1" * 100_000 + b"\n",
    "LONG of many digits": b"L" + b"1" * 100_000 + b"L\n",
    "FLOAT of nonsense": b"Fabc\n",
    "bytearray": named("builtins", "bytearray") + b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    "bytes": named("builtins", "bytes") + b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    "sets of a wide list": wide(100_000) + b"](" + (named("builtins", "set") + b"h\x00\x85R") * 2000 + b"e",
    "bytes of a long text": (
        text("x" * 100_000)
        + b"q\x000]("
        + (named("_codecs", "encode") + b"h\x00" + LATIN1 + b"\x86R") * 9000
        + b"e"
    ),
    "OrderedDict of a wide list": wide(1000) + named("collections", "OrderedDict") + b"h\x00\x85R",
    "set of a range": named("builtins", "set") + named("builtins", "range") + HUGE + b"\x85R\x85R",
    "complex of a text": named("builtins", "complex") + text("1" * 1000) + b"N\x86R",
    "many classes": b"".join(named("m", f"n{i}") + b"0" for i in range(20_000)) + b"N",
    "a class of a long name": named("m", "n" * 2000),
    "an unhashable key": b"}]Ns",
    "a missing memo": b"h\x07",
    "an empty stack": b"R",
    "a mark only": b"(",
    "no such opcode": b"\xff",
    "an opcode cut": b"J\x01",
    "nothing": b"",
    "a protocol of the future": b"\x80\x63N",
    "out of band": b"\x97",
    "a persistent id": b"NQ",
    "a persistent id as text": b"Px\n",
    "wrong UTF-8": b"X\x02\x00\x00\x00\xff\xfe",
    "bytes after the end": b"N.N",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused(bomb: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_pickle(op(BOMBS[bomb]), where="here")
    assert "here" in str(caught.value) and len(str(caught.value)) < 1000
    for read in READERS:
        with pytest.raises(CheckpointError):
            read(op(BOMBS[bomb]), tmp_path)


def test_bombs_do_not_take_memory() -> None:
    """All of them, and deep nesting, in a process that may not grow by more than about 2 GB."""
    script = f"""
        import resource, sys
        from pathlib import Path

        def peak():  # not ru_maxrss, which begins at what the process that started this one had
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

        sys.path.insert(0, {str(ROOT / "tests" / "hostile")!r})
        from test_hostile_pickles import BOMBS, op
        from convtools.errors import CheckpointError
        from convtools.stores.pickles import load_pickle
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        before = peak()
        for body in BOMBS.values():
            try:
                load_pickle(op(body), where="here")
            except CheckpointError:
                continue
            raise SystemExit("was read")
        print(peak() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 300_000, run.stdout


NESTED = {
    "lists": (b"]" * 1_000_000 + b"a" * 999_999, list),
    "tuples": (b")" + b"\x85" * 1_000_000, tuple),
    "dicts": (b"N" + (b"}" + b"K\x01") * 200_000 + b"N" + b"s" * 200_000 + b"\x86", tuple),
    "tuples as a key": (b"})" + b"\x85" * 1_000_000 + b"Ns", dict),
    "tuples in a set": (b"\x8f()" + b"\x85" * 1_000_000 + b"\x90", set),
    "objects": (CLASS + b"q\x000" + b"h\x00" * 200_000 + b")" + b"\x85R" * 200_000, Inert),
    "states": (CLASS + b"q\x000" + b"h\x00)\x81" * 200_000 + b"N" + b"b" * 200_000, Inert),
}


@pytest.mark.parametrize("kind", NESTED)
def test_deep_nesting_does_not_crash(kind: str) -> None:
    """In a process of its own: what could go wrong is the end of the C stack."""
    script = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests" / "hostile")!r})
        from test_hostile_pickles import NESTED, op
        from convtools.errors import CheckpointError
        from convtools.stores.pickles import load_pickle, plain
        body, expected = NESTED[{kind!r}]
        value = load_pickle(op(body), where="here")
        assert isinstance(value, expected), type(value)
        try:
            plain(value, "here")
        except CheckpointError as error:
            assert "nested too deep" in str(error)
        else:
            assert {kind!r} == "tuples as a key", "was made plain"
        del value
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr[-2000:]


def test_a_value_that_doubles_is_not_made_plain() -> None:
    data = b"]K\x02a" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60))
    value = load_pickle(op(data), where="here")
    with pytest.raises(CheckpointError, match="has no end"):
        plain(value, "here")


def test_a_list_that_holds_itself_is_not_made_plain() -> None:
    with pytest.raises(CheckpointError, match="here"):
        plain(load_pickle(op(b"]q\x00h\x00a"), where="here"), "here")


# ---- damage


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_cut_anywhere_is_refused(protocol: int) -> None:
    data = pickle.dumps({"a": [1, 2.5, "é", b"\x00", (None, True), {1, 2}, 10**30]}, protocol)
    for end in range(len(data)):
        with pytest.raises(CheckpointError):
            load_pickle(data[:end], where="here")


CUT = {
    ".metadata": (DIST / ".metadata", 997),
    "common.pt": (DIST / "common.pt", 211),
    "legacy": (LEGACY, 3671),
}


@pytest.mark.parametrize("kind", CUT)
def test_a_real_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    source, step = CUT[kind]
    data = source.read_bytes()
    path = tmp_path / source.name
    for end in [*range(0, len(data), step), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=source.name):
            read_metadata(tmp_path) if kind == ".metadata" else read_archive(path)


def test_a_tensor_item_cut_anywhere_is_refused(tmp_path: Path) -> None:
    prefix, suffix = tensor_frame("BF16", (4, 4))
    item = prefix + bytes(32) + suffix
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(item)
    for end in range(len(item)):
        with pytest.raises(CheckpointError, match="__0_0"):
            read_tensor_item(path, 0, end)
        with pytest.raises(CheckpointError, match="__0_0"):
            read_tensor_item(path, end + 1, len(item) - end - 1)


@pytest.mark.parametrize("bit", [0x01, 0x80, 0xFF])
def test_a_tensor_item_with_a_byte_changed_is_refused_or_lies_inside(tmp_path: Path, bit: int) -> None:
    prefix, suffix = tensor_frame("BF16", (4, 4))
    item = prefix + bytes(32) + suffix
    path = tmp_path / "__0_0.distcp"
    for at in range(len(item)):
        path.write_bytes(item[:at] + bytes([item[at] ^ bit]) + item[at + 1 :])
        try:
            ref = read_tensor_item(path, 0, len(item))
        except CheckpointError as error:
            assert "__0_0" in str(error)
        else:
            assert len(prefix) <= ref.offset and ref.offset + ref.nbytes <= len(prefix) + 32


@pytest.mark.parametrize("bit", [0x01, 0x80, 0xFF])
def test_a_metadata_with_a_byte_changed_is_an_error_or_a_checkpoint(tmp_path: Path, bit: int) -> None:
    data = (DIST / ".metadata").read_bytes()
    for name in ("__0_0", "__0_1", "__1_0", "__1_1"):
        (tmp_path / f"{name}.distcp").write_bytes((DIST / f"{name}.distcp").read_bytes())
    read = 0
    for at in range(0, len(data), 251):
        (tmp_path / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        try:
            read += len(read_metadata(tmp_path).tensors) > 0
        except CheckpointError as error:
            assert str(tmp_path) in str(error)
    assert read > 20  # most of the file is save plans and names, and some changes lie there


# ---- zips that lie


def patched(item: bytes, at: int, value: bytes) -> bytes:
    return item[:at] + value + item[at + len(value) :]


def good() -> tuple[bytes, int, int]:
    """An item of torch's own, where its directory begins, and where the entry of data/0 does."""
    out = io.BytesIO()
    torch.save(torch.ones(4), out)
    item = out.getvalue()
    start = struct.unpack("<I", item[-6:-2])[0]
    entry = item.rindex(b"archive/data/0") - 46
    return item, start, entry


def lying() -> dict[str, bytes]:
    item, start, entry = good()
    local = struct.unpack("<I", item[entry + 42 : entry + 46])[0]
    one = struct.pack("<I", 1 << 30)
    return {
        "size": patched(item, entry + 20, one + one),
        "size on disk": patched(item, entry + 20, one),
        "size beyond 64 bits": patched(item, entry + 20, b"\xff" * 8),
        "place": patched(item, entry + 42, one),
        "place of another record": patched(item, entry + 42, bytes(4)),
        "compressed": patched(item, entry + 10, b"\x08\x00"),
        "encrypted": patched(item, entry + 8, b"\x01\x08"),
        "compressed in its own header": patched(item, local + 8, b"\x08\x00"),
        "name in its own header": patched(item, local + 30, b"A"),
        "size in its own header": patched(item, local + 18, b"\x07"),
        "length of its own header": patched(item, local + 28, b"\xff\xff"),
        "name": patched(item, entry + 46, b"archive/data/9"),
        "name of another": patched(item, entry + 46, b"archive/versio"),
        "name that is no text": patched(item, entry + 46, b"\xff\xfe"),
        "count": patched(item, len(item) - 14, b"\x09\x00\x09\x00"),
        "start of the directory": patched(item, len(item) - 6, bytes(4)),
        "a comment": item[:-2] + b"\x01\x00x",
        "no local header": patched(item, local, b"QK"),
        "no end": item[:-22],
        "bytes after the end": item + b"x",
        "bytes before": b"x" + item,
        "empty": b"",
        "a short text": b"PK\x03\x04",
        "an end only": struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0, 0, 0, 0, 0),
        "directory of nothing": item[:start] + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 9, 9, 0, start, 0),
        "big-endian": archive(tensor_pickle(), data__0=bytes(16), byteorder=b"big"),
        "no byte order known": archive(tensor_pickle(), data__0=bytes(16), byteorder=b"middle"),
        "record missing": archive(tensor_pickle()),
        "record short": archive(tensor_pickle(), data__0=bytes(15)),
        "record elsewhere": archive(tensor_pickle(), elsewhere__0=bytes(16)),
        "no pickle": archive(b"").replace(b"data.pkl", b"beta.pkl"),
        "an empty pickle": archive(b""),
        "text": b"version https://git-lfs.github.com/spec/v1\n" * 3,
    }


def tensor_pickle(
    numel: bytes = b"K\x04",
    offset: bytes = b"K\x00",
    size: bytes = b"K\x04\x85",
    stride: bytes = b"K\x01\x85",
    kind: bytes = b"ctorch\nFloatStorage\n",
    key: bytes = b"X\x01\x00\x00\x000",
    tag: bytes = b"X\x07\x00\x00\x00storage",
) -> bytes:
    pid = b"(" + tag + kind + key + text("cpu") + numel + b"tQ"
    call = named("torch._utils", "_rebuild_tensor_v2")
    return op(
        call + b"(" + pid + offset + size + stride + b"\x89" + named("collections", "OrderedDict") + b")RtR",
        2,
    )


def test_the_assembled_tensor_is_read(tmp_path: Path) -> None:
    assert from_tensor_item_of(tensor_pickle(), tmp_path).shape == (4,)


def from_tensor_item_of(data: bytes, path: Path) -> TensorRef:
    item = archive(data, data__0=bytes(16))
    (path / "__0_0.distcp").write_bytes(item)
    return read_tensor_item(path / "__0_0.distcp", 0, len(item))


@pytest.mark.parametrize("lie", lying())
def test_a_zip_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(lying()[lie])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        read_tensor_item(path, 0, path.stat().st_size)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """The payload of one record hides the header and payload of another."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("archive/data/1", bytes(8))
    hidden = inner.getvalue()[: 30 + len("archive/data/1") + 8]
    item = archive(tensor_pickle(), data__0=hidden.ljust(80, b"\0"), data__1=bytes(8))
    outer, entry = item.index(hidden), item.rindex(b"archive/data/1") - 46
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(patched(item, entry + 42, struct.pack("<I", outer)))
    with pytest.raises(CheckpointError, match="the record before it ends at"):
        read_tensor_item(path, 0, len(item))


TENSOR_LIES = {
    "storage larger than its record": {"numel": b"K\x05"},
    "storage of 2**40": {"numel": b"\x8a\x06\x00\x00\x00\x00\x00\x01"},
    "storage negative": {"numel": b"J\xff\xff\xff\xff"},
    "storage of a text": {"numel": text("4")},
    "size past the storage": {"size": b"K\x05\x85"},
    "stride past the storage": {"stride": b"K\x02\x85"},
    "offset past the storage": {"offset": b"K\x01"},
    "offset negative": {"offset": b"J\xff\xff\xff\xff"},
    "stride negative": {"stride": b"J\xff\xff\xff\xff\x85"},
    "size negative": {"size": b"J\xff\xff\xff\xff\x85"},
    "size of 2**200": {"size": b"\x8a\x1a" + bytes(25) + b"\x01\x85"},
    "size of a float": {"size": b"G" + struct.pack(">d", 4) + b"\x85"},
    "size of a truth": {"size": b"\x88\x85"},
    "size of a list": {"size": b"]K\x04a"},
    "size of a text": {"size": text("4")},
    "more dims than strides": {"size": b"K\x02K\x02\x86"},
    "a thousand dims": {"size": b"(" + b"K\x01" * 1000 + b"t", "stride": b"(" + b"K\x01" * 1000 + b"t"},
    "a storage of no class": {"kind": text("FloatStorage")},
    "a storage called": {"kind": named("collections", "OrderedDict")},
    "a key that is a number": {"key": b"K\x00"},
    "a key that climbs": {"key": text("../data.pkl")},
    "no storage": {"tag": text("module")},
    "an unknown storage": {"kind": named("torch", "QInt8Storage")},
    "an untyped storage": {"kind": named("torch.storage", "UntypedStorage")},
}


@pytest.mark.parametrize("lie", TENSOR_LIES)
def test_a_tensor_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        from_tensor_item_of(tensor_pickle(**TENSOR_LIES[lie]), tmp_path)


@pytest.mark.parametrize("pid", [b"N", b")", b"K\x01", b"(" + text("storage") + b"t", b"]", text("storage")])
def test_an_odd_persistent_id_is_refused(tmp_path: Path, pid: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        from_tensor_item_of(op(pid + b"Q"), tmp_path)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "common.pt"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        read_archive(path)


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 5), (0, -1), (0, 1 << 50), (1 << 62, 1), (99, 1), (98, 2)]
)
def test_a_window_outside_of_the_file_is_refused(tmp_path: Path, offset: int, length: int) -> None:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(bytes(99))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        read_tensor_item(path, offset, length)
