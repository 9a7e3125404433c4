"""The files of a Hub repository at one commit: what is there, and local copies of the small ones.

A revision is resolved to a commit first: a branch that moves on meanwhile changes nothing. Whole files
come by way of Hugging Face's own cache, so that what its users have there is used, and found again.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

from convtools.errors import CheckpointError, UsageError, capped
from convtools.stores.hf import MAX_FILES, SKIPPED
from convtools.stores.hub_errors import library
from convtools.stores.hub_http import Patience, RemoteFile, patiently
from convtools.stores.names import is_unicode, tick
from convtools.stores.regular_file import absence, open_regular

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"({_PART}/{_PART})(?:@([^\s@]{{1,255}}))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
"""The name of a commit."""


def parse_repo(text: str) -> tuple[str, str | None] | None:
    """(repository, revision) of `org/name` or `org/name@revision`; None for what is neither.

    >>> parse_repo("nvidia/Nemotron@v1.0"), parse_repo("org/name"), parse_repo("./a/b")
    (('nvidia/Nemotron', 'v1.0'), ('org/name', None), None)
    """
    match = _REPO.fullmatch(text)
    if not match or ".." in match[1] or "--" in match[1] or match[1].endswith(".git"):
        return None
    return match[1], match[2]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit."""

    repo_id: str
    """`org/name`."""
    commit: str
    """40 hex digits."""
    files: Mapping[str, RemoteFile]
    """By name, as the Hub lists them, each name checked."""
    license: tuple[tuple[str, str], ...] = ()
    """What its model card says of `license`, `license_name` and `license_link`."""
    patience: Patience = field(default_factory=Patience)
    stop: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def root(self) -> Path:
        """`hf:/org/name@commit`, for paths in messages and blobs."""
        return Path(f"hf:/{self.repo_id}@{self.commit}")

    def download(self, name: str, limit: int) -> Path:
        """A whole file of at most `limit` bytes, by way of the cache. Raises CheckpointError."""
        where, size = self.root / name, self.files[name].size
        if size > limit:
            raise too_large(where, size, limit)
        download, options = library().hf_hub_download, {}
        if "tqdm_class" in signature(download).parameters:  # since 1.1; a bar a small file is a nuisance
            options["tqdm_class"] = _silent_bar()

        def call() -> str:
            got: str = download(self.repo_id, name, revision=self.commit, library_name="convtools", **options)
            return got

        try:
            path = Path(patiently(call, self.patience, self.stop, where=str(where)))
        except OSError as error:  # its own check of the length, or a cache that cannot be written
            raise CheckpointError(f"cannot fetch {tick(name)}: {error}", where=where) from None
        file, found = open_regular(path)
        file.close()
        if found != size:
            raise CheckpointError(
                f"{tick(name)} in the cache is not the one of the Hub",
                where=path,
                expected=f"{size} bytes",
                found=f"{found} bytes",
                fix="remove it from the cache, and run again",
            )
        return path

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of such a file. Raises CheckpointError."""
        path = self.download(name, limit)
        file, size = open_regular(path)
        with file:
            if size > limit:
                raise too_large(path, size, limit)
            return file.read(size)

    def cached(self, name: str) -> Path | None:
        """The whole file in the cache, if it is there; asks nobody."""
        found = library().try_to_load_from_cache(self.repo_id, name, revision=self.commit)
        if not isinstance(found, str) or absence(Path(found)):
            return None
        path = Path(found)
        return path if path.stat().st_size == self.files[name].size else None


@cache
def _silent_bar() -> Any:
    class Silent(library().utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return Silent


def find_repository(
    repo_id: str,
    revision: str | None = None,
    *,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
) -> Repository:
    """Ask the Hub which commit `revision` is, and what is there.

    Raises UsageError for what is no repository's name, CheckpointError for everything else.
    """
    patience, stop = patience or Patience(), stop or threading.Event()
    api = library().HfApi(library_name="convtools")
    asked = f"hf:/{repo_id}" + (f"@{revision}" if revision else "")
    info = patiently(
        lambda: api.model_info(repo_id, revision=revision, files_metadata=True, timeout=60.0),
        patience,
        stop,
        where=asked,
    )
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise CheckpointError("the Hub names no commit", where=asked, found=tick(info.sha))
    files = _checked_files(info.siblings or [], asked)
    return Repository(repo_id, info.sha, files, _license(info.card_data), patience, stop)


def check_repo_id(repo_id: str) -> None:
    """Raise UsageError unless `repo_id` is `org/name`."""
    if parse_repo(repo_id) != (repo_id, None):
        raise UsageError("not the name of a repository", found=tick(repo_id), expected="`org/name`")


def too_large(path: Path, size: int, limit: int) -> CheckpointError:
    """The error for a file over a limit."""
    what = f"{tick(path.name)} is too large"
    return CheckpointError(what, where=path, expected=f"<= {limit} bytes", found=size)


def _checked_files(siblings: list[Any], asked: str) -> dict[str, RemoteFile]:
    if len(siblings) > MAX_FILES:
        raise CheckpointError(f"over {MAX_FILES} files: this is not a checkpoint's repository", where=asked)
    files, faults = {}, []
    for one in siblings:
        name, size = one.rfilename, one.size
        parts = name.split("/") if isinstance(name, str) else [""]
        if any(part in ("", ".", "..") for part in parts) or not is_unicode(name) or "\0" in name:
            faults.append(f"{tick(name)}: not the name of a file")
        elif type(size) is not int or not 0 <= size < 2**63:
            faults.append(f"{tick(name)}: its size is {tick(size)}")
        elif not SKIPPED.intersection(parts):
            files[name] = RemoteFile(size, one.lfs.sha256 if one.lfs else one.blob_id)
    if faults:
        raise CheckpointError("the Hub lists files that cannot be", where=asked, found=capped(faults))
    return files


def _license(card: Any) -> tuple[tuple[str, str], ...]:
    found = ((key, getattr(card, key, None)) for key in ("license", "license_name", "license_link"))
    return tuple((key, value) for key, value in found if isinstance(value, str) and len(value) < 500)
