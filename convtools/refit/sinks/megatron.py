"""A Megatron checkpoint as a sink: Hugging Face files aside, converted when all of it has come, then renamed.

The conversion is the one of `convtools convert`, and what it made is compared with what arrived before the
push is prepared. On disk lie, for that long, the old checkpoint, the new one, and its Hugging Face form.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convtools.conversion.api import convert
from convtools.conversion.options import Options
from convtools.equality.canonical import Canonical, Side, open_side
from convtools.equality.compare import compare
from convtools.errors import UsageError, tick
from convtools.layout.region import Region
from convtools.refit.errors import RefitError
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.sinks.checkpoint import CheckpointApplier
from convtools.refit.sinks.side_files import NOTE
from convtools.staging import Staging
from convtools.stores.hf_write import INDEX_NAME
from convtools.stores.megatron_dir import is_megatron

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]


class MegatronApplier(CheckpointApplier):
    """Writes as `CheckpointApplier` does, and publishes a conversion of that."""

    def __init__(
        self, dst: Path, files: Mapping[str, bytes], options: Options, *, fsync: bool = True
    ) -> None:
        """`options`: format and layout, as for `convtools.convert`. Raises UsageError."""
        if options.to == "hf" or options.dry_run or options.hf_config is not None:
            raise UsageError(
                "options of a Megatron directory", expected="to='torch_dist' or 'torch', and its layout",
                found=f"to={options.to!r}, dry_run={options.dry_run}, hf_config={options.hf_config}",
            )  # fmt: skip
        options.check()
        super().__init__(dst, files, fsync=False)
        real = Path(os.path.realpath(dst))
        self._aside = real.with_name(f".{real.name}.hf")
        self._options = replace(options, overwrite=False, fsync=False)
        self._sync_out = fsync
        self._out: Staging | None = None
        self._sides: dict[Path, Side] = {}

    def begin(self, plan: RefitPlan) -> None:
        """Claim the destination, then make the files aside. Raises StorageError."""
        out = Staging(self._dst, overwrite=True, replaceable=_refusal, fsync=self._sync_out)
        self._out = self._open.enter_context(out)
        super().begin(plan)

    def prepare(self) -> None:
        """Convert, and see that it is what came. Raises what `convert` raises, and RefitError."""
        super().prepare()
        assert self._staging is not None and self._layout is not None and self._out is not None
        if self._layout.index:
            with self._staging.open(INDEX_NAME) as file:
                file.write(self._layout.index)
        convert(self._staging.path, self._out.path, self._options, alone=True)
        found = compare(self._staging.path, self._out.path)
        if found.equal is not True:
            raise RefitError(f"what was converted is not what came: {found.verdict}", where=self._dst)

    def swap(self, version: int) -> None:
        """Publish: everything to disk, the note last, one rename."""
        assert self._out is not None
        self._publish(self._out, {NOTE: self._note(version)})
        self._leave()

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """The published bytes, under their Hugging Face name."""
        return self._read(self._dst, tensor)

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """The same of what is not published yet."""
        return None if self._out is None else self._read(self._out.path, tensor)

    def _leave(self) -> None:
        self._out, self._sides = None, {}
        super()._leave()

    def _read(self, root: Path, tensor: Tensor) -> "Bytes":
        import numpy as np

        side = self._sides.get(root)
        if side is None:
            side = self._sides[root] = open_side(root)
        if tensor.name not in side.hf:
            raise RefitError(f"{tick(tensor.name)} is not in the checkpoint", where=root)
        reader = side.reader()
        try:
            own = Canonical(side, dict(side.hf), dict(side.dtypes))
            return np.frombuffer(own.whole(tensor.name, Region.whole(tensor.shape), reader), "u1")
        finally:
            reader.close()


def _refusal(dst: Path) -> str | None:
    return None if is_megatron(dst) and (dst / NOTE).is_file() else "it was not written by a push"
