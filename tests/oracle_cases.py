"""The checkpoints that real Megatron wrote: those in fixtures/, and the rest where it is found."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent
ROOTS = [HERE.parent / "shared/oracle", HERE / "fixtures/oracle"]  # the whole cases before what fits here
if "CONVTOOLS_ORACLE" in os.environ:
    ROOTS.insert(0, Path(os.environ["CONVTOOLS_ORACLE"]))


@dataclass(frozen=True)
class Layout:
    """One saved layout of a case."""

    case: str
    name: str
    root: Path
    case_root: Path
    sizes: dict[str, int]
    grouped: bool
    mcore: str
    padded: int

    def __str__(self) -> str:
        return f"{self.case}-{self.name}"

    @property
    def hf(self) -> Path | None:
        """The HF directory of the same weights, where the case has one."""
        path = self.case_root / "hf"
        return path if path.is_dir() else None


def layouts(*prefixes: str) -> list[Layout]:
    """Every layout of every case whose name begins with one of these, each once."""
    found: dict[tuple[str, str], Layout] = {}
    for root in ROOTS:
        for manifest in sorted(path for p in prefixes for path in root.glob(f"{p}*/manifest.json")):
            about = json.loads(manifest.read_text())
            for name, sizes in about["layouts"].items():
                folder = manifest.parent / name
                if folder.is_dir():
                    found.setdefault(
                        (about["case"], name),
                        Layout(
                            about["case"],
                            name,
                            folder,
                            manifest.parent,
                            {axis: sizes[axis] for axis in ("tp", "pp", "ep", "etp")},
                            sizes.get("moe_grouped_gemm", True),
                            about["versions"]["megatron_core"],
                            about["vocab"]["padded"],
                        ),
                    )
    return list(found.values())


def shard_name(tp: int, pp: int, ep: int) -> str:
    """Name of a rank's dump."""
    return f"tp{tp}_pp{pp}_ep{ep}.safetensors"
