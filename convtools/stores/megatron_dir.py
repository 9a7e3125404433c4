"""A Megatron checkpoint folder: which iteration is meant, and in which format it is."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from convtools.errors import CheckpointError, UnsupportedEncoding, UsageError, capped
from convtools.stores.names import tick
from convtools.stores.regular_file import open_regular

TRACKER = "latest_checkpointed_iteration.txt"
_MAX_TRACKER_NBYTES = 100
_ITERATION = re.compile(r"iter_([0-9]{7,})")
_RANK = re.compile(r"mp_rank_[0-9]{2,}(_[0-9]{3,}){0,2}")


@dataclass(frozen=True, slots=True)
class IterationDir:
    """One saved iteration."""

    path: Path
    iteration: int | str | None
    """A number, `release`, or None where the folder's name does not tell."""
    format: str
    """`torch_dist` or `torch`."""


def is_megatron(root: Path) -> bool:
    """Whether `root` looks like a Megatron save folder or one iteration of it, going by names alone."""
    try:
        names = os.listdir(root)
    except OSError:
        return False
    return TRACKER in names or any(
        n in ("metadata.json", ".metadata", "release") or _ITERATION.fullmatch(n) or _RANK.fullmatch(n)
        for n in names
    )


def iterations(root: Path) -> list[str]:
    """Folders of the iterations saved in `root`, in order."""
    return sorted((n for n in _names(root) if _ITERATION.fullmatch(n) or n == "release"), key=_order)


def find_iteration(root: Path, wanted: int | str | None = None) -> IterationDir:
    """The iteration that `wanted`, the tracker file, or the folder itself names.

    Raises CheckpointError where there is none, UsageError where it is unclear which is meant.
    """
    names = _names(root)
    if _format(names):
        match = _ITERATION.fullmatch(root.resolve().name)
        here: int | str | None = (
            int(match[1]) if match else "release" if root.resolve().name == "release" else None
        )
        if wanted is not None and wanted != here:
            raise UsageError(
                f"--iteration {wanted}, but this folder is one iteration itself",
                where=root,
                found="its name does not tell which" if here is None else here,
            )
        return _opened(root, here)
    saved = sorted((n for n in names if _ITERATION.fullmatch(n) or n == "release"), key=_order)
    if wanted is None:
        wanted = _tracked(root, names, saved)
    folder = wanted if isinstance(wanted, str) else f"iter_{wanted:07d}"
    if folder not in saved:
        raise CheckpointError(
            f"there is no `{folder}` in this checkpoint",
            where=root,
            found=capped(saved) or "no saved iteration",
            fix="pass --iteration N or --iteration release",
        )
    return _opened(root / folder, wanted)


def _names(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint folder: {error.strerror}", where=root) from None


def _order(name: str) -> int:
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else -1


def _tracked(root: Path, names: list[str], saved: list[str]) -> int | str:
    if TRACKER in names:
        path = root / TRACKER
        file, size = open_regular(path)
        with file:
            if size > _MAX_TRACKER_NBYTES:
                raise CheckpointError(
                    "the tracker file is too large",
                    where=path,
                    expected=f"<= {_MAX_TRACKER_NBYTES} bytes",
                    found=size,
                )
            text = file.read(_MAX_TRACKER_NBYTES).decode("ascii", "replace").strip()
        if text == "release":
            return text
        if re.fullmatch(r"[0-9]{1,12}", text):
            return int(text)
        raise CheckpointError(
            "the tracker file does not name an iteration",
            where=path,
            expected="a number, or `release`",
            found=tick(text[:40]),
        )
    if not saved:
        raise CheckpointError(
            "this is no checkpoint that convtools knows",
            where=root,
            expected=f"config.json with *.safetensors, or {TRACKER} with iter_*/, or one iteration itself",
            found=capped(map(tick, names)) or "an empty folder",
        )
    raise CheckpointError(
        f"`{TRACKER}` is missing: the save may not have finished",
        where=root,
        found=capped(saved),
        fix="pass --iteration N or --iteration release to read one all the same",
    )


def _format(names: list[str]) -> str | None:
    if "metadata.json" in names or ".metadata" in names:
        return "torch_dist"
    return "torch" if any(_RANK.fullmatch(n) for n in names) else None


def _opened(path: Path, iteration: int | str | None) -> IterationDir:
    names = _names(path)
    found = _format(names)
    if found is None:
        raise CheckpointError(
            "this iteration holds no checkpoint",
            where=path,
            expected="metadata.json and .metadata (torch_dist), or mp_rank_* folders (torch)",
            found=capped(map(tick, names)) or "an empty folder",
        )
    if found == "torch_dist" and "metadata.json" not in names:
        raise UnsupportedEncoding(
            "this is a plain DCP checkpoint (torch_dcp or fsdp_dtensor), not torch_dist",
            where=path,
            found=".metadata without metadata.json",
            fix="save it with --ckpt-format torch_dist",
        )
    if found == "torch_dist" and ".metadata" not in names:
        raise CheckpointError(
            "`.metadata` is missing", where=path, fix="the save did not finish, or the copy is partial"
        )
    return IterationDir(path, iteration, found)
