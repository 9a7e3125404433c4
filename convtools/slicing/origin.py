"""What a slice is cut from: an HF folder, a repository on the Hub, or a Megatron checkpoint, seen alike."""

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convtools.conversion.megatron_target import SPELLING_FILE
from convtools.conversion.plan import SideFile
from convtools.conversion.source import Duplicate, LeftOut, Padding, Source
from convtools.errors import ConfigError, UsageError
from convtools.families.table import Table
from convtools.layout.mapping import Mapping
from convtools.manifest import MANIFEST_NAME
from convtools.stores.base import StoredTensor
from convtools.stores.hf import HFCheckpoint, is_hf, open_hf
from convtools.stores.json_file import strict_json
from convtools.stores.megatron_dir import is_megatron
from convtools.stores.regular_file import leading_outside

if TYPE_CHECKING:
    from convtools.stores.hub import HubCheckpoint

_OWN = {
    SPELLING_FILE: "a note of convtools' own",
    MANIFEST_NAME: "the source's own manifest",
    "README.md": "the source's own model card",
}
QUANT_FILE = "hf_quant_config.json"
"""The one side file that a slice does not take as it is: it can name layers."""
_LINK = "a link to a file outside of the folder: it may be anybody's, and is not followed"


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint to cut: its config, and every tensor under its Hugging Face name."""

    name: str
    """As it was asked for: a path, or `org/name`."""
    format: str
    """`hf` (a folder, or a repository on the Hub), `torch_dist` or `torch`."""
    root: Path | None
    """Folder that it lies in, where it lies in one."""
    config: dict[str, Any]
    config_bytes: bytes
    tensors: dict[str, StoredTensor]
    """By the store's own names."""
    to_hf: Mapping | None
    """Side a: stored names, side b: HF names. None: they are the same tensors."""
    hf: dict[str, tuple[int, ...]]
    """Shape of every HF tensor."""
    dtypes: dict[str, str]
    """dtype of every HF tensor."""
    side_files: tuple[SideFile, ...] = ()
    """Of a repository only what must be known before: the others are fetched when all else is written."""
    left_out: tuple[LeftOut, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    padding: tuple[Padding, ...] = ()
    notes: tuple[str, ...] = ()
    revision: str | None = None
    """Commit on the Hub."""
    hub: "HubCheckpoint | None" = None
    conversion: Source | None = field(default=None, repr=False)
    """What it is as the source of a conversion, on the Megatron side."""

    @property
    def table(self) -> Table:
        """The model's table, on the Megatron side."""
        assert self.conversion is not None, "only asked of Megatron checkpoints"
        return self.conversion.table


def open_origin(src: str, *, iteration: int | str | None = None, hf_config: Path | None = None) -> Origin:
    """Open a folder, or `org/name[@revision]` on the Hub; reads metadata only.

    Raises CheckpointError, ConfigError, AccountingError, UsageError.
    """
    root = Path(src)
    if root.is_dir():
        if is_hf(root) or not is_megatron(root):
            _only_megatron(iteration, hf_config)
            return _folder(src, root)
        return _megatron(src, root, iteration, hf_config)
    from convtools.stores.hub import parse_repo

    repo = None if root.exists() else parse_repo(src)
    if repo is None:
        raise UsageError(
            f"`{src}` is neither a folder nor a repository on the Hub",
            expected="a checkpoint's folder, or org/name[@revision]",
        )
    _only_megatron(iteration, hf_config)
    return _hub(src, *repo)


def _only_megatron(iteration: int | str | None, hf_config: Path | None) -> None:
    if iteration is not None or hf_config is not None:
        raise UsageError("--iteration and --hf-config are for a Megatron source", fix="leave them out")


def _folder(src: str, root: Path) -> Origin:
    store = open_hf(root)
    reasons = dict.fromkeys(leading_outside(root, store.side_files), _LINK) | _OWN
    side = tuple(SideFile(n, root / n) for n in store.side_files if n not in reasons)
    return _checkpoint(store, src, root, reasons, side_files=side)


def _checkpoint(
    store: HFCheckpoint, name: str, root: Path | None, reasons: MappingABC[str, str], **more: Any
) -> Origin:
    """A folder or a repository; `reasons` says which of its side files stay behind, and why."""
    return Origin(
        name=name,
        format="hf",
        root=root,
        config=store.config,
        config_bytes=store.config_bytes,
        tensors=store.tensors,
        to_hf=None,
        hf={name: t.shape for name, t in store.tensors.items()},
        dtypes={name: t.dtype for name, t in store.tensors.items()},
        left_out=(
            *(LeftOut(n, reasons[n]) for n in store.side_files if n in reasons),
            *(LeftOut(name, reason) for name, reason in store.unread_files),
            *(LeftOut(f"{name} in {file}", "the index does not assign it there")
              for name, file in store.stray_tensors),
        ),
        **more,
    )  # fmt: skip


def _megatron(src: str, root: Path, iteration: int | str | None, hf_config: Path | None) -> Origin:
    from convtools.conversion.api import open_source

    source = open_source(root, iteration=iteration, hf_config=hf_config)
    if not source.config_bytes:
        raise ConfigError(
            "no config.json belongs to this checkpoint", where=root, fix="give --hf-config FOLDER"
        )
    config = strict_json(source.config_bytes.decode(), Path("config.json"), constants=True)
    assert isinstance(config, dict), "open_source has parsed it"
    copies = {copy.name: copy.of for copy in source.model.copies()}
    dtypes = source.dtypes()
    side = source.side_root
    return Origin(
        name=src,
        format=source.format,
        root=root,
        config=config,
        config_bytes=source.config_bytes,
        tensors=source.tensors,
        to_hf=source.to_hf,
        hf={n: s for n, s in source.hf.items() if n not in copies},
        dtypes={n: dtypes[n] for n in source.hf if n not in copies},
        side_files=tuple(SideFile(n, side / n) for n in source.side_files if side and n not in _OWN),
        left_out=source.left_out,
        duplicates=source.duplicates,
        padding=source.padding,
        notes=source.notes,
        conversion=source,
    )


def _hub(src: str, repo: str, revision: str | None) -> Origin:
    from convtools.stores.hub import open_hub

    store = open_hub(repo, revision)
    now = tuple(SideFile(n, store.side_path(n)) for n in store.side_files if n == QUANT_FILE)
    return _checkpoint(store, repo, None, _OWN, revision=store.commit, hub=store, side_files=now)
