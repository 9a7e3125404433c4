"""Writes pickles that name classes which are not imported here, such as `torch.bfloat16`.

Python's own pickler refuses to name what it cannot import. This one writes protocol 2, the one that
`torch.save` uses and `torch.load(weights_only=True)` accepts, opcode for opcode as Python would.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from struct import pack
from typing import Any

from convtools.errors import UsageError
from convtools.stores.base import TORCH_DTYPE
from convtools.stores.stand_ins import InertType

_BATCH = 1000  # items between a MARK and its SETITEMS or APPENDS, as Python batches them
_DTYPE_PATHS = frozenset(f"torch.{name}" for name in TORCH_DTYPE.values())


@dataclass(frozen=True, slots=True)
class Global:
    """A class, function or constant by name; pickled as a reference to it."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The result of calling a function when the pickle is loaded."""

    function: Global
    args: tuple[Any, ...]
    items: Mapping[Any, Any] | None = None
    """Set on the result, one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class, with a state but without a call of its constructor."""

    cls: Global
    state: Any


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Something that the pickle refers to by a persistent id."""

    pid: Any


def torch_dtype(dtype: str) -> Global:
    """`torch.bfloat16` for "BF16".

    >>> torch_dtype("F8_E4M3")
    Global(module='torch', name='float8_e4m3fn')
    """
    return Global("torch", TORCH_DTYPE[dtype])


def namespace(values: Mapping[str, Any]) -> Instance:
    """An `argparse.Namespace` of these values."""
    return Instance(Global("argparse", "Namespace"), dict(values))


def dump_pickle(value: Any) -> bytes:
    """The pickle of a value made of None, numbers, strings, lists, tuples, dicts and the types above.

    A torch dtype that was read by `load_pickle` is written as itself. Raises `UsageError` on any other
    object: what was not loaded from one file must not find its way into another.
    """
    writer = _Writer()
    writer.write(value)
    return b"".join([b"\x80\x02", *writer.out, b"."])


class _Writer:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._memo: dict[Any, int] = {}  # by id, or by the value of a Global
        self._kept: list[Any] = []  # so that no id is used twice

    def write(self, value: Any) -> None:
        if value is None or value is True or value is False:
            self.out.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif type(value) is int and value.bit_length() < 8 * 255:
            self.out.append(int_opcode(value))
        elif type(value) is float:
            self.out.append(b"G" + pack(">d", value))
        elif (index := self._memo.get(_key(value))) is not None:
            self.out.append(b"h%c" % index if index < 256 else b"j" + pack("<I", index))
        else:
            self._write_new(value)

    def _write_new(self, value: Any) -> None:
        if isinstance(value, InertType) and value.path in _DTYPE_PATHS:
            self.write(Global(*value.path.split(".")))
        elif type(value) is str:
            encoded = value.encode("utf-8", "surrogatepass")
            self._remember(value, b"X" + pack("<I", len(encoded)) + encoded)
        elif type(value) is tuple:
            self._tuple(value)
        elif type(value) is list:
            self._remember(value, b"]")
            self._batches([(item,) for item in value], b"a", b"e")
        elif type(value) is dict:
            self._remember(value, b"}")
            self._batches(value.items(), b"s", b"u")
        elif type(value) is OrderedDict:
            self._call(Call(Global("collections", "OrderedDict"), (), value), value)
        elif type(value) is Global:
            self._remember(value, f"c{value.module}\n{value.name}\n".encode())
        elif type(value) is Call:
            self._call(value, value)
        elif type(value) is Instance:
            self.write(value.cls)
            self._remember(value, b")\x81")
            self.write(value.state)
            self.out.append(b"b")
        elif type(value) is Outside:
            self.write(value.pid)
            self.out.append(b"Q")
        else:
            raise UsageError(
                f"a {type(value).__name__} cannot be written to a torch file",
                found=value,
                fix="make it a plain value first (convtools.stores.pickles.plain)",
            )

    def _call(self, call: Call, key: Any) -> None:
        self.write(call.function)
        self.write(call.args)
        self._remember(key, b"R")
        self._batches((call.items or {}).items(), b"s", b"u")

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out.append(b")")
            return
        if len(value) > 3:
            self.out.append(b"(")
        for item in value:
            self.write(item)
        self._remember(value, {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _batches(self, items: Iterable[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        """Items in batches, each followed by an opcode for one item or for the items since a mark."""
        listed = list(items)
        for start in range(0, len(listed), _BATCH):
            batch = listed[start : start + _BATCH]
            self.out.append(b"(" * (len(batch) > 1))
            for item in batch:
                for part in item:
                    self.write(part)
            self.out.append(many if len(batch) > 1 else one)

    def _remember(self, value: Any, opcodes: bytes) -> None:
        index = len(self._memo)
        self._memo[_key(value)] = index
        self._kept.append(value)
        self.out.append(opcodes + (b"q%c" % index if index < 256 else b"r" + pack("<I", index)))


def _key(value: Any) -> Any:
    return value if type(value) is Global else id(value)


def int_opcode(value: int) -> bytes:
    """The opcode that pushes an integer.

    >>> int_opcode(7), int_opcode(-1)
    (b'K\\x07', b'J\\xff\\xff\\xff\\xff')
    """
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(encoded) + encoded
