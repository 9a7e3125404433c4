"""Views: the notation in which layouts are written.

A view names a tensor and factors its dims, so that an interleave becomes a rectangle:

>>> qkv = View("linear_qkv.weight", (2, 4 + 2, 8), 32)     # 2 groups of 4 query heads, k, v
>>> qkv.shape
(96, 32)
>>> q = qkv[:, :4]                                          # every group's query heads
>>> same(q, View("q_proj.weight", (2, 4, 8), 32)).numel
2048

Indexing takes ints and slices of step 1, one a factor, in reading order.
"""

from dataclasses import dataclass
from math import prod

from convtools.layout.piece import Loop, Piece, merged


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a view: `size` steps of `step` along dim `dim` of the tensor."""

    dim: int
    size: int
    step: int


@dataclass(frozen=True, slots=True, init=False)
class View:
    """Part of a tensor under factored dims."""

    name: str
    shape: tuple[int, ...]
    """The tensor's own shape."""
    axes: tuple[Axis, ...]
    origin: tuple[int, ...]

    def __init__(self, name: str, *dims: int | tuple[int, ...]) -> None:
        axes: list[Axis] = []
        shape: list[int] = []
        for dim, factors in enumerate(dims):
            parts = (factors,) if isinstance(factors, int) else factors
            shape.append(prod(parts))
            axes += [Axis(dim, n, prod(parts[i + 1 :])) for i, n in enumerate(parts)]
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "origin", (0,) * len(shape))

    def _with(self, axes: list[Axis], origin: list[int]) -> "View":
        view = object.__new__(View)
        for field, value in zip(
            ("name", "shape", "axes", "origin"),
            (self.name, self.shape, tuple(axes), tuple(origin)),
            strict=True,
        ):
            object.__setattr__(view, field, value)
        return view

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> "View":
        """Narrow the leading axes: an int drops its axis, a slice keeps it. Raises IndexError."""
        picks = index if isinstance(index, tuple) else (index,)
        if len(picks) > len(self.axes):
            raise IndexError(f"`{self.name}` has {len(self.axes)} axes, {len(picks)} indices given")
        axes, origin = [], list(self.origin)
        for i, axis in enumerate(self.axes):
            pick = picks[i] if i < len(picks) else slice(None)
            if isinstance(pick, int):
                if not 0 <= pick < axis.size:
                    raise IndexError(f"`{self.name}`: index {pick} is outside axis {i} of size {axis.size}")
                origin[axis.dim] += pick * axis.step
                continue
            start, stop, step = pick.indices(axis.size)
            if step != 1 or stop < start or max(pick.start or 0, pick.stop or 0) > axis.size:
                raise IndexError(f"`{self.name}`: {pick} does not fit axis {i} of size {axis.size}")
            origin[axis.dim] += start * axis.step
            axes.append(Axis(axis.dim, stop - start, axis.step))
        return self._with(axes, origin)

    def renamed(self, name: str) -> "View":
        """The same view of a tensor of another name."""
        view = self._with(list(self.axes), list(self.origin))
        object.__setattr__(view, "name", name)
        return view

    def factored(self, axis: int, *sizes: int) -> "View":
        """The same elements with one axis written as several: runs of a slice that have runs of their own.

        >>> View("in_proj.weight", 10, 3)[2:8].factored(0, 2, 3).axes
        (Axis(dim=0, size=2, step=3), Axis(dim=0, size=3, step=1), Axis(dim=1, size=3, step=1))
        """
        old = self.axes[axis]
        if prod(sizes) != old.size:
            raise IndexError(f"`{self.name}`: {sizes} do not make up axis {axis} of size {old.size}")
        new = [Axis(old.dim, n, old.step * prod(sizes[i + 1 :])) for i, n in enumerate(sizes)]
        return self._with([*self.axes[:axis], *new, *self.axes[axis + 1 :]], list(self.origin))

    def permuted(self, *order: int) -> "View":
        """The same elements with the axes in another order (a transpose)."""
        if sorted(order) != list(range(len(self.axes))):
            raise IndexError(f"`{self.name}`: {order} is no order of its {len(self.axes)} axes")
        return self._with([self.axes[i] for i in order], list(self.origin))


def same(a: View, b: View) -> Piece:
    """(a, b) -> the piece that says their elements are equal, axis by axis. Raises ValueError."""
    a_axes = [x for x in a.axes if x.size != 1]
    b_axes = [x for x in b.axes if x.size != 1]
    if [x.size for x in a_axes] != [x.size for x in b_axes]:
        raise ValueError(
            f"`{a.name}` {[x.size for x in a.axes]} and `{b.name}` {[x.size for x in b.axes]} differ in shape"
        )
    loops = [Loop(x.size, x.dim, x.step, y.dim, y.step) for x, y in zip(a_axes, b_axes, strict=True)]
    return Piece(a.name, b.name, a.origin, b.origin, merged(loops))
