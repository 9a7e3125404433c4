"""What a pickle's classes and functions become: objects that remember and do nothing."""

import sys
from functools import lru_cache
from typing import Any

from convtools.stores.names import tick

_HARMLESS: dict[str, frozenset[str] | None] = {
    "argparse": frozenset({"Namespace"}),
    "builtins": frozenset(
        {"object", "type", "int", "float", "str", "bytes", "bool", "list", "dict", "tuple"}
        | {"range", "slice", "xrange", "long", "unicode"}
    ),
    "collections": frozenset({"OrderedDict", "defaultdict", "Counter", "deque"}),
    "copyreg": frozenset({"_reconstructor", "__newobj__", "__newobj_ex__"}),
    "datetime": None,
    "decimal": frozenset({"Decimal"}),
    "enum": None,
    "fractions": frozenset({"Fraction"}),
    "pathlib": None,
    "pathlib._local": None,
    "types": frozenset({"SimpleNamespace"}),
    "uuid": frozenset({"UUID", "SafeUUID"}),
}
"""Names of the standard library that become stand-ins (None: any of the module); others are refused."""
_SIGNAL_ENUMS = frozenset({"Signals", "Handlers", "Sigmasks"})


def harmless(module: str, name: str) -> bool:
    """Whether a pickle that names this may be read at all.

    >>> harmless("argparse", "Namespace"), harmless("megatron.core.enums", "ModelType")
    (True, True)
    >>> harmless("os", "system"), harmless("builtins", "eval"), harmless("pathlib", "os.system")
    (False, False, False)
    """
    if module.split(".", 1)[0] not in sys.stdlib_module_names:
        return True  # a stand-in runs nothing, and these names are the checkpoint's own
    if module == "signal":
        return name in _SIGNAL_ENUMS or name.startswith("SIG")
    names = _HARMLESS.get(module, frozenset())
    return "." not in name and (names is None or name in names)


class InertType(type):
    """The class of stand-ins. A stand-in is itself what a name like `torch.bfloat16` becomes."""

    path: str
    """The dotted name it stands for."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("a pickle may not change a class")

    def __repr__(cls) -> str:
        return f"<{tick(cls.path)}, not loaded>"


class Inert(metaclass=InertType):
    """A stand-in for an object that was not made: its class, and what the pickle gave it."""

    __slots__ = ("args", "items", "kwargs", "state")
    path = ""
    args: tuple[Any, ...]
    """What its constructor would have been called with."""
    kwargs: dict[str, Any]
    state: Any
    """What it would have been restored from."""
    items: list[Any]
    """What it would have been filled with; pairs for a mapping."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        """Take any arguments, and call nothing with them."""
        self = object.__new__(cls)
        self.args, self.kwargs, self.state, self.items = args, kwargs, None, []
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Remember an item that the real object would have been given."""
        self.items.append(item)

    add = append

    def __repr__(self) -> str:
        return f"<a {tick(type(self).path)}, not loaded>"


class OrderedState(dict[Any, Any], metaclass=InertType):
    """Stands for `collections.OrderedDict`; keeps apart what a pickle sets on the object itself."""

    __slots__ = ("attributes",)
    path = "collections.OrderedDict"

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


@lru_cache(maxsize=4096)
def stand_in(path: str) -> InertType:
    """The stand-in for the class or function called `path`.

    >>> stand_in("torch.bfloat16")
    <`torch.bfloat16`, not loaded>
    """
    return InertType("Inert", (Inert,), {"__slots__": (), "path": path})
