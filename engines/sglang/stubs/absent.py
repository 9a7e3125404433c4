"""Test only. Modules in which every name can be imported and nothing can be called.

SGLang imports its CUDA kernels, and torchvision, at its start, whether or not they are used. There is no
build of them for a machine without a GPU: these stand in, and what would compute with them raises.
"""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Collection, Sequence


class Absent:
    """A function or class that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{self.__name__} has no build for this machine")

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


def attribute(name: str) -> Absent:
    """For a module's `__getattr__`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every submodule of a package, but those that must be missing."""

    def __init__(self, package: str, missing: Collection[str] = ()) -> None:
        self._prefix, self._missing = package + ".", missing

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module that is made of nothing."""
        if name.startswith(self._prefix) and name not in self._missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """With whatever name is asked of it."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""
