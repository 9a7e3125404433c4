"""`publish`: put a checkpoint folder on the Hugging Face Hub, with a model card and a manifest.

All that can be known is checked before anything is written, here or there: the weights against the
manifest, the network, the account's rights, what the repository has already. The upload itself is
`huggingface_hub`'s own for large folders; what has arrived is not sent again by a second run.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from convtools.disk import writing
from convtools.errors import ConvtoolsError, StorageError, UsageError, capped
from convtools.manifest import MANIFEST_NAME, Manifest, encode
from convtools.slicing.destination import Destination, check_destination, find_destination
from convtools.slicing.layers import find_layers, text_part
from convtools.slicing.model_card import CARD_NAME, CardFacts, is_ours, model_card
from convtools.slicing.weights_manifest import Bar, checked_manifest
from convtools.stores.hf import CONFIG, HFCheckpoint, open_hf
from convtools.stores.hub_errors import explain, hub_errors
from convtools.stores.hub_files import COMMIT, find_repository, parse_repo
from convtools.stores.names import tick
from convtools.stores.regular_file import leading_outside, open_regular

_T = TypeVar("_T")
_AGAIN = "run the same command again: what has arrived is not sent a second time"
_MAX_CARD_NBYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What was published, and where."""

    repo_id: str
    url: str
    commit: str
    """The commit that has all of it."""
    created: bool
    """Whether the repository is new."""
    files: int
    nbytes: int
    """Bytes of all files, whether they had to be sent or were there."""
    manifest: str
    """`checked`, `completed` or `written`."""
    card: str
    """`written`, `as it was`, or why it was kept."""
    removed: tuple[str, ...]
    """Files of the repository that were deleted."""
    not_published: tuple[tuple[str, str], ...]
    """(file, reason) of what the folder has and the repository does not get."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def publish(
    path: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    overwrite_card: bool = False,
    replace: bool = False,
    workers: int = 4,
    bar: Bar | None = None,
) -> PublishReport:
    """Upload checkpoint folder `path` to repository `repo_id` (`org/name`), made where it is not there.

    `private` makes it private. `revision` is a branch. A README.md that is not convtools' own is kept
    unless `overwrite_card`. Weights in the repository that `path` does not have are refused, or deleted
    if `replace`. Raises UsageError, CheckpointError where `path` is no checkpoint or differs from its
    manifest, StorageError where the Hub cannot be reached, refuses, or the upload breaks off.
    """
    root = Path(path)
    if not root.is_dir():
        raise UsageError(f"`{root}` is not a directory", expected="a checkpoint's folder")
    store = open_hf(root)
    names, not_published = _names(store)
    _check_links(root, names)
    check_destination(repo_id, revision)
    made = checked_manifest(root, store, workers, bar or (lambda _: nullcontext(lambda _: None)))
    there = find_destination(repo_id, revision, private)
    stale = there.stale(names)
    if stale and not replace:
        raise StorageError(
            "the repository has weights that the folder does not have: together they are no checkpoint",
            where=repo_id,
            found=capped(map(tick, stale)),
            fix="--replace deletes them there; or publish to a new repository",
        )
    card, how, notes = _card(root, store, made.manifest, repo_id, overwrite_card)
    created = there.create()
    if made.how != "checked":
        _write(root, MANIFEST_NAME, encode(made.manifest))
    if card is not None and how != "as it was":
        _write(root, CARD_NAME, card)
    names = sorted({*names, MANIFEST_NAME, CARD_NAME})
    sizes = {name: (root / name).stat().st_size for name in names}
    _attempt(lambda: there.upload(root, names), repo_id)
    if stale:
        _attempt(lambda: there.delete(stale), repo_id)
    commit = _arrived(there, sizes)
    return PublishReport(
        repo_id=repo_id,
        url=there.url,
        commit=commit,
        created=created,
        files=len(names),
        nbytes=sum(sizes.values()),
        manifest=made.how,
        card=how,
        removed=tuple(stale),
        not_published=tuple(not_published),
        notes=tuple(notes),
    )


def _names(store: HFCheckpoint) -> tuple[list[str], list[tuple[str, str]]]:
    """(files to upload, files to leave here with the reason)."""
    index = [store.index_file] if store.index_file else []
    hidden = [name for name in store.side_files if any(part.startswith(".") for part in name.split("/"))]
    side = [name for name in store.side_files if name not in hidden]
    left = [*((name, "a hidden file") for name in hidden), *store.unread_files]
    return [CONFIG, *index, *store.weight_files, *side], left


def _check_links(root: Path, names: list[str]) -> None:
    """Raise UsageError for links to files elsewhere: they may be of anybody, and would be public."""
    outside = leading_outside(root, names)
    if outside:
        raise UsageError(
            "files of the folder are links to files outside of it",
            where=root,
            found=capped(map(tick, outside)),
            fix="put copies in their place, if they are meant to be published",
        )


def _card(
    root: Path, store: HFCheckpoint, manifest: Manifest, repo_id: str, overwrite: bool
) -> tuple[bytes | None, str, list[str]]:
    """(text to write or None, what happens to the card, notes)."""
    path, old = root / CARD_NAME, None
    if CARD_NAME in store.side_files:
        file, size = open_regular(path)
        with file:
            old = file.read(_MAX_CARD_NBYTES)
        if not overwrite and (size > _MAX_CARD_NBYTES or not is_ours(old.decode(errors="replace"))):
            return None, "kept: it is not one of convtools' (--overwrite-card replaces it)", []
    base, notes = _base(manifest), []
    license: tuple[tuple[str, str], ...] = ()
    if base:
        try:
            license = find_repository(base).license
        except ConvtoolsError as error:
            notes.append(f"the card names no license: {base} could not be asked for its own ({error.what})")
    config = store.config
    architectures = config.get("architectures")
    facts = CardFacts(
        repo_id=repo_id,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        model_type=str(config["model_type"]) if "model_type" in config else None,
        base_model=base,
        license=license,
        files=len(store.weight_files),
        nbytes=sum(t.nbytes for t in store.tensors.values()),
        layer_nbytes=_layer_nbytes(store) if manifest.layers is not None else (),
    )
    new = model_card(manifest, facts).encode()
    return new, "as it was" if new == old else "written", notes


def _base(manifest: Manifest) -> str | None:
    """The repository that it was made from, if it was one."""
    source = manifest.source
    if source is None or source.revision is None or parse_repo(source.name) != (source.name, None):
        return None
    if not COMMIT.fullmatch(source.revision):  # it goes into a command that readers copy
        return None
    return source.name


def _layer_nbytes(store: HFCheckpoint) -> tuple[int, ...]:
    try:
        layers = find_layers(store.tensors, text_part(store.config)).decoder
    except ConvtoolsError:  # a model whose layers are not told apart: the card does without
        return ()
    return tuple(sum(store.tensors[name].nbytes for name in names) for names in layers)


def _write(root: Path, name: str, content: bytes) -> None:
    """Under `name` lies the old file or the new one, never a part."""
    path, aside = root / name, root / f".{name}.{os.getpid()}.tmp"
    with writing(root):
        try:
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _attempt(call: Callable[[], _T], repo_id: str) -> _T:
    """`call()`, an upload, with its errors in words."""
    known_errors: tuple[type[Exception], ...] = (*hub_errors(), RuntimeError, OSError, ValueError)
    try:
        return call()
    except known_errors as error:  # its threads wrap what they raise
        cause = error.__cause__ or error
    if isinstance(cause, hub_errors()):  # whose own text shows the signed link of the storage
        known = explain(cause, repo_id, StorageError)
        what, found, fix = f"the upload did not finish: {known.what}", known.found, known.fix
    else:
        what, found, fix = "the upload did not finish", f"{type(cause).__name__}: {cause}"[:500], None
    raise StorageError(what, where=repo_id, found=found, fix=f"{fix}; then {_AGAIN}" if fix else _AGAIN)


def _arrived(there: Destination, sizes: dict[str, int]) -> str:
    """The commit, once the Hub lists every file with its size. Raises StorageError."""
    found = there.listing()
    wrong = [
        f"{tick(name)} ({found.files[name].size if name in found.files else 'not there'})"
        for name, size in sizes.items()
        if name not in found.files or found.files[name].size != size
    ]
    if wrong:
        raise StorageError(
            "the Hub does not have what was sent", where=there.repo_id, found=capped(wrong), fix=_AGAIN
        )
    return found.commit
