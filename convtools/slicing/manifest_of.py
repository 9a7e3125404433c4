"""The manifest of a slice: what each of its tensors is, where it came from, and a hash of its bytes."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convtools.manifest import (
    XXH3,
    Manifest,
    ManifestSource,
    ManifestTensor,
    hash_bytes,
    hash_tensor,
    made_by,
)
from convtools.slicing.origin import Origin
from convtools.slicing.plan_slice import SlicePlan
from convtools.stores.base import FilePlan, Payload


def hash_files(files: Iterable[FilePlan], root: Path, workers: int) -> dict[str, str]:
    """Tensor -> hash of its bytes in the files under `root`."""
    places = [
        (part.name, root / file.path, at, part.nbytes) for file in files for at, part in _placed(file.parts)
    ]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda place: hash_tensor(*place[1:]), places)
        return dict(zip((name for name, *_ in places), found, strict=True))


def slice_manifest(origin: Origin, plan: SlicePlan, hashes: Mapping[str, str]) -> Manifest:
    """What the slice's tensors are, with the hashes of their bytes as they were written."""
    shapes = plan.target.shapes(origin)
    tensors = {
        new: ManifestTensor(
            dtype=plan.target.dtypes[new],
            shape=tuple(shapes[new]),
            source=kept.source,
            source_rows=kept.rows,
            hashes={XXH3: hashes[new]},
        )
        for new, kept in plan.kept.items()
    }
    source = ManifestSource(name=_name(origin), revision=origin.revision, format=origin.format)
    return Manifest(
        made_by=made_by(),
        source=source,
        layers=list(plan.keep),
        notes=list(plan.changes.made),
        tensors=tensors,
        config=next(hash_bytes(f.content) for f in plan.target.side_files if isinstance(f.content, bytes)),
    )


def _name(origin: Origin) -> str:
    """The repository, or the folder's own name: where it lay on one machine is nobody's business."""
    return origin.name if origin.root is None else origin.root.resolve().name


def _placed(parts: tuple[bytes | Payload, ...]) -> list[tuple[int, Payload]]:
    out, at = [], 0
    for part in parts:
        if isinstance(part, Payload):
            out.append((at, part))
        at += len(part) if isinstance(part, bytes) else part.nbytes
    return out
