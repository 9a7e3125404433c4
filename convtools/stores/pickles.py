"""Reads a pickle without running it.

PyTorch's files hold pickles, and a pickle is a program. Here it may build lists, dicts and numbers,
and nothing else: each class or function it names becomes an inert stand-in that remembers what it was
called with. A name out of the standard library that could do harm is refused outright.
"""

import gc
import io
import pickle
import threading
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Mapping
from typing import Any

from convtools.errors import CheckpointError, ConvtoolsError, UnsafePickle
from convtools.stores.names import tick
from convtools.stores.pickle_opcodes import check_opcodes
from convtools.stores.stand_ins import Inert, InertType, OrderedState, harmless, stand_in

MAX_GLOBALS = 10_000
"""Distinct classes and functions one pickle may name; Megatron's name about twenty."""
MAX_NAME = 1000
MAX_DEPTH = 64
"""How deep `plain` follows containers."""
MAX_NODES = 1_000_000
"""How many values `plain` makes: a small pickle can describe an endless tree."""

# hash() of nested tuples recurses in C without a limit, at about 80 bytes of stack a level.
_STACK_PER_TUPLE = 160
_TUPLES_ON_ANY_STACK = 5_000
_MAX_STACK = 1 << 32

_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_PATHS = frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath"})


def load_pickle(
    data: bytes,
    *,
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    known: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    """The value of a pickle, made of plain containers, numbers and stand-ins.

    `known` gives a caller's own stand-in for a (module, name); it must not be changeable by the pickle:
    a class of `InertType`, or a closure made for this call. `persistent` resolves persistent ids.

    Raises `UnsafePickle` where the pickle names code that could do harm, `CheckpointError` where it is
    damaged; both name `where`.
    """
    check_opcodes(data, where)
    loader = _Loader(data, where, persistent, known or {})
    depth = sum(map(data.count, (b"\x85", b"\x86", b"\x87", b"t")))  # no tuple nests deeper than this
    collecting = gc.isenabled()
    gc.disable()  # a load makes no garbage, and millions of objects for the collector to visit in vain
    try:
        return loader.load() if depth <= _TUPLES_ON_ANY_STACK else _with_stack(loader.load, depth)
    except ConvtoolsError:
        raise
    except Exception as error:  # what the C unpickler raises on nonsense is not a closed set
        what = f"the pickle cannot be read: {type(error).__name__}: {tick(str(error))}"
        raise CheckpointError(what, where=where) from error
    finally:
        if collecting:
            gc.enable()


def plain(value: Any, where: str = "a pickle") -> Any:
    """The same value as dicts, lists, strings and numbers, for reading Megatron's `args`.

    A namespace becomes a dict, a dtype its name ("torch.bfloat16"), a path its text. Any other object
    that was not loaded becomes {"class": its name} with the "args", "state" and "items" it was given.

    Raises `CheckpointError` on a value that is nested too deep or too large, or loses a key.
    """
    left = MAX_NODES

    def walk(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise CheckpointError("a value is nested too deep or has no end", where=where)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            found = {_plain_key(k): walk(v, depth + 1) for k, v in value.items()}
            if len(found) < len(value):
                raise CheckpointError("two keys of a dict read the same as text", where=where)
            return found
        if type(value) in (list, tuple, set, frozenset):
            return [walk(item, depth + 1) for item in value]
        if isinstance(value, InertType):
            return value.path
        if isinstance(value, Inert):
            return walk(_record(value), depth + 1)
        return (
            f"<{len(value)} bytes>" if isinstance(value, bytes | bytearray) else f"<a {type(value).__name__}>"
        )

    return walk(value, 0)


def _plain_key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, InertType):
        return key.path
    return str(key) if key is None or isinstance(key, bool | int | float) else tick(key)


def _record(value: Inert) -> Any:
    path = type(value).path
    if path in _NAMESPACES and isinstance(value.state, dict):
        return value.state
    if path == "collections.defaultdict":
        return dict(value.items)
    if path.startswith("pathlib.") and path.rsplit(".", 1)[1] in _PATHS:
        first, *rest = [str(part) for part in value.args] or ["."]
        return "/".join([first.rstrip("/"), *rest]) if rest else first
    parts = {"args": value.args, "kwargs": value.kwargs, "state": value.state, "items": value.items}
    return {"class": path, **{name: part for name, part in parts.items() if part}}


class _Loader(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        where: str,
        persistent: Callable[[Any], Any] | None,
        known: Mapping[tuple[str, str], Any],
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._where = where
        self._persistent = persistent
        self._known = {**_constructors(len(data)), **known}
        self._seen: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (IMPORT_MAPPING.get(module, module), name)  # protocol 2 has Python 2's names
        found = self._seen.get(key)
        if found is None:
            if len(self._seen) >= MAX_GLOBALS or len(module) + len(name) > MAX_NAME:
                what = f"the pickle names over {MAX_GLOBALS} classes, or one of over {MAX_NAME} characters"
                raise CheckpointError(what, where=self._where)
            found = self._known.get(key) or self._stand_in(*key)
            self._seen[key] = found
        return found

    def _stand_in(self, module: str, name: str) -> InertType:
        path = f"{module}.{name}"
        if not harmless(module, name):
            raise UnsafePickle(
                f"the pickle refers to {tick(path)}, which can run code; nothing of it was run",
                where=self._where,
                fix="do not load this file with torch.load either; get it again from someone you trust",
            )
        return stand_in(path)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise CheckpointError("the pickle refers to data outside of it; none is known", where=self._where)
        return self._persistent(pid)


def _constructors(budget: int) -> dict[tuple[str, str], Any]:
    """The few real objects a pickle may make; all together, no more elements than it has bytes."""

    def spend(items: Any) -> Any:
        nonlocal budget
        budget -= len(items)
        if budget < 0:
            raise ValueError("it makes more elements than it has bytes")
        return items

    def collect(kind: Callable[[Any], Any]) -> Callable[..., Any]:
        def build(items: Any = ()) -> Any:
            if not isinstance(items, list | tuple | set | frozenset):
                raise TypeError(f"a set of {type(items).__name__}")
            return kind(spend(items))

        return build

    def encode(text: str, encoding: str) -> Any:  # how protocol 2 spells bytes
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise ValueError("bytes in another form than latin1")
        return spend(text).encode("latin1")

    def array(data: Any = b"", encoding: str = "latin1") -> bytearray:
        if isinstance(data, int):  # bytearray(10**12) would be that many bytes
            raise TypeError("a bytearray of a number")
        return bytearray(encode(data, encoding) if isinstance(data, str) else spend(data))

    def number(real: float, imag: float) -> complex:
        return complex(real + 0.0, imag + 0.0)

    def reconstruct(kind: InertType, base: object, state: object) -> Any:  # protocols 0 and 1
        if not isinstance(kind, InertType):
            raise TypeError("an object of no class")
        return kind() if state is None else kind(state)

    return {
        ("copyreg", "_reconstructor"): reconstruct,
        ("builtins", "set"): collect(set),
        ("builtins", "frozenset"): collect(frozenset),
        ("builtins", "bytearray"): array,
        ("builtins", "bytes"): lambda: b"",  # so spelled where it is empty
        ("builtins", "complex"): number,
        ("_codecs", "encode"): encode,
        ("collections", "OrderedDict"): OrderedState,
    }


def _with_stack(load: Callable[[], Any], depth: int) -> Any:
    """`load()`, on a thread whose stack has room to hash tuples nested `depth` deep."""
    nbytes = depth * _STACK_PER_TUPLE + (1 << 20) & -4096
    if nbytes > _MAX_STACK:
        raise ValueError(f"{depth} tuples, which may be nested")
    results: list[Any] = []
    errors: list[Exception] = []

    def body() -> None:
        try:
            results.append(load())
        except Exception as error:  # raised again below, in the caller's thread
            errors.append(error)

    before = threading.stack_size(nbytes)
    try:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
