"""What a comparison is asked to do."""

import math
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from convtools.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How two sets of weights are compared. Without any: every byte of every tensor."""

    ulp: int | None = None
    """Floats of at most this distance in the integer order of their dtype are equal."""
    atol: float | None = None
    """`|a - b| <= atol + rtol * |b|` is equal."""
    rtol: float | None = None
    """See `atol`."""
    ignore_dtype: bool = False
    """Compare tensors of two dtypes as values of the wider one."""
    only: tuple[str, ...] = ()
    """Compare only tensors whose names match one of these globs."""
    skip: tuple[str, ...] = ()
    """Do not compare tensors whose names match one of these globs."""
    iteration_a: int | str | None = None
    """Which iteration of A, where A is a Megatron checkpoint."""
    iteration_b: int | str | None = None
    """Which iteration of B."""
    hf_config: Path | str | None = None
    """Folder with the config.json of the Megatron sides."""
    workers: int = min(4, os.cpu_count() or 1)
    """Threads that read and compare."""
    causes: bool = True
    """Whether to look for what a difference comes from."""

    def check(self) -> None:
        """Raise UsageError for values that cannot be."""
        if self.ulp is not None and (self.atol is not None or self.rtol is not None):
            raise UsageError("--ulp and --atol/--rtol are two tolerances", fix="give one of them")
        if self.ulp is not None and not (isinstance(self.ulp, int) and 0 <= self.ulp < 2**64):
            raise UsageError(f"--ulp {self.ulp} is no distance", expected="0 or more, below 2^64")
        for name, patterns in (("only", self.only), ("skip", self.skip)):
            if isinstance(patterns, str):  # each of its letters would be a pattern
                raise UsageError(f"`{name}` is one string", expected="a sequence of patterns")
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            number = isinstance(value, int | float)
            if value is not None and not (number and math.isfinite(value) and value >= 0):
                raise UsageError(f"--{name} {value} is no tolerance", expected="a finite number, 0 or more")
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} compares nothing", expected="1 or more")

    @property
    def tolerant(self) -> bool:
        """Whether unequal bytes may pass."""
        return self.ulp is not None or self.atol is not None or self.rtol is not None

    @property
    def mode(self) -> str:
        """How elements are compared, in words.

        >>> CompareOptions(atol=1e-3).mode
        'atol 0.001 rtol 0'
        """
        if self.ulp is not None:
            mode = f"ulp {self.ulp}"
        elif self.tolerant:
            mode = f"atol {self.atol or 0:g} rtol {self.rtol or 0:g}"
        else:
            mode = "exact"
        return f"{mode}, dtypes ignored" if self.ignore_dtype else mode

    def wanted(self, name: str) -> bool:
        """Whether a tensor is to be compared."""
        if self.only and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.skip)
