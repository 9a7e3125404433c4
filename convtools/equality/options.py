"""What a comparison is asked to do."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from convtools.errors import UsageError, capped, tick

_NEAR = 10_000
"""Names that a pattern which matches nothing is held against: the search takes 0.1 ms each."""


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
    only: Sequence[str] = ()
    """Compare only tensors whose names match one of these globs; a string is one of them."""
    skip: Sequence[str] = ()
    """Do not compare tensors whose names match one of these globs; a string is one of them."""
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

    def __post_init__(self) -> None:
        for name in ("only", "skip"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    def check(self) -> None:
        """Raise UsageError for values that cannot be."""
        if self.ulp is not None and (self.atol is not None or self.rtol is not None):
            raise UsageError("--ulp and --atol/--rtol are two tolerances", fix="give one of them")
        if self.ulp is not None and not (isinstance(self.ulp, int) and 0 <= self.ulp < 2**64):
            raise UsageError(f"--ulp {self.ulp} is no distance", expected="0 or more, below 2^64")
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

    def check_patterns(self, names: Collection[str]) -> None:
        """Raise UsageError for a pattern that matches none of the tensors' names."""
        for option, patterns in (("only", self.only), ("skip", self.skip)):
            for pattern in patterns:
                if any(fnmatchcase(name, pattern) for name in names):
                    continue
                plain = pattern.strip("*")
                near = [name for name in names if plain.lower() in name.lower()] if plain else []
                near = near or get_close_matches(pattern, list(names)[:_NEAR], 3, 0.4)
                raise UsageError(
                    f"--{option} {tick(pattern)} matches no tensor",
                    expected="the name of a tensor, or a glob such as `*.bias` that covers whole names",
                    found=f"names such as {capped([tick(n) for n in near or sorted(names)], 3)}"
                    if names
                    else "no tensor on either side",
                )

    def wanted(self, name: str) -> bool:
        """Whether a tensor is to be compared."""
        if self.only and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.skip)
