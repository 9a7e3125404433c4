"""A checkpoint on the Hugging Face Hub, opened like a folder: metadata is fetched, weights stay there.

What it gives is what `stores.hf` gives of a folder, checked by the same rules. A tensor's blob names
either a file of the local cache, or `hf:/org/name@commit/file`, of which `HubReader` fetches ranges.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from convtools.errors import CheckpointError, UsageError
from convtools.stores.hf import (
    CONFIG,
    MAX_CONFIG_NBYTES,
    HFCheckpoint,
    open_hf,
    place_tensors,
    refuse_folder,
    refuse_sub_byte,
    sort_files,
)
from convtools.stores.hf_index import (
    MAX_INDEX_NBYTES,
    SINGLE,
    check_assigned,
    check_single,
    choose_index,
    weight_map,
)
from convtools.stores.hub_errors import library
from convtools.stores.hub_files import Repository, check_repo_id, find_repository, parse_repo, too_large
from convtools.stores.hub_http import Patience, Ranges
from convtools.stores.json_file import json_object
from convtools.stores.move import write_all
from convtools.stores.names import tick
from convtools.stores.regular_file import open_regular
from convtools.stores.safetensors_header import HeaderEntry, check_header, header_nbytes, read_header

__all__ = ["HubCheckpoint", "HubReader", "is_remote", "open_hub", "parse_repo"]

_MAX_SIDE_NBYTES = 2_000_000_000
_MAX_IN_MEMORY = 100_000_000


@dataclass(frozen=True, slots=True)
class HubCheckpoint(HFCheckpoint):
    """A checkpoint at one commit; `root` is `hf:/org/name@commit`, or offline its folder in the cache."""

    repo_id: str
    """`org/name`."""
    revision: str | None
    """What was asked for."""
    commit: str
    """The commit that it was, 40 hex digits."""
    repository: Repository | None = field(repr=False, compare=False)
    """None offline."""

    def side_path(self, name: str) -> Path:
        """The local copy, in Hugging Face's cache, of one of `side_files` or of config.json and the index.

        Raises CheckpointError where it cannot be fetched.
        """
        if name not in (*self.side_files, CONFIG, self.index_file):
            raise UsageError(f"{tick(name)} is not a side file of the checkpoint", where=self.root)
        return self.repository.download(name, _MAX_SIDE_NBYTES) if self.repository else self.root / name

    def fetch_side(self, name: str) -> bytes:
        """The bytes of such a file, at most 100 MB of them. Raises CheckpointError."""
        file, size = open_regular(self.side_path(name))
        with file:
            if size > _MAX_IN_MEMORY:
                raise too_large(self.root / name, size, _MAX_IN_MEMORY)
            return file.read(size)


class HubReader:
    """Fetches ranges of a checkpoint's remote files into local ones. Safe to share among threads."""

    def __init__(
        self,
        checkpoint: HubCheckpoint,
        *,
        patience: Patience | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._root, repository = checkpoint.root, checkpoint.repository
        self._ranges = None if repository is None else Ranges(repository, patience, stop)

    def copy(
        self, path: Path, offset: int, nbytes: int, fd: int, to: int, progress: Callable[[int], None]
    ) -> None:
        """Write `nbytes` of remote file `path`, from byte `offset` of it on, at byte `to` of descriptor `fd`.

        `path` is a blob's (`is_remote`). `progress` is told how many bytes more were written. Raises
        CheckpointError where the bytes cannot be had, or others come; StorageError on a wish to stop.
        """

        def put(at: int, piece: bytes) -> None:
            write_all(fd, piece, to + at)
            progress(len(piece))

        self._remote(path).copy(path.relative_to(self._root).as_posix(), offset, nbytes, put)

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """The same bytes, in memory. Raises as `copy` does."""
        return self._remote(path).read(path.relative_to(self._root).as_posix(), offset, nbytes)

    def _remote(self, path: Path) -> Ranges:
        assert self._ranges is not None and is_remote(path), "local files are read as files"
        return self._ranges


def is_remote(path: Path) -> bool:
    """Whether a blob's path is `hf:/...`, which only `HubReader` can read."""
    return path.parts[:1] == ("hf:",)


def open_hub(
    repo_id: str,
    revision: str | None = None,
    *,
    list_sub_byte: bool = False,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
    workers: int = 8,
) -> HubCheckpoint:
    """The checkpoint in repository `repo_id`; fetches its config, its index and the headers of its files.

    With HF_HUB_OFFLINE it is read from the cache alone. Raises UsageError for what is no repository's
    name, and where `huggingface_hub` is not installed; CheckpointError for what `open_hf` refuses, and
    where the Hub cannot be reached or refuses access; UnsupportedEncoding.
    """
    check_repo_id(repo_id)
    if library().constants.HF_HUB_OFFLINE:
        return _from_cache(repo_id, revision, list_sub_byte)
    repository = find_repository(repo_id, revision, patience=patience, stop=stop)
    return _open(repository, revision, list_sub_byte, workers)


def _open(repository: Repository, revision: str | None, list_sub_byte: bool, workers: int) -> HubCheckpoint:
    root, files = repository.root, repository.files
    top = sorted(name for name in files if "/" not in name)
    if CONFIG not in top:
        refuse_folder(root, top)
    config_bytes = repository.read(CONFIG, MAX_CONFIG_NBYTES)
    config = json_object(config_bytes, root / CONFIG, constants=True)

    def index(path: Path) -> dict[str, str]:
        raw = repository.read(path.name, MAX_INDEX_NBYTES)
        return weight_map(json_object(raw, path, constants=False), path)

    index_file = choose_index(root, top, index)
    assigned = None
    if index_file is None:
        check_single(root, top)
        local, headers = _headers(repository, {SINGLE: []}, workers)
    else:
        assigned = index(root / index_file)
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name, file in assigned.items():
            names[file].append(name)
        there = {file: names[file] for file in sorted(names) if file in files}
        local, headers = _headers(repository, there, workers)
        absent = {file: "not in the repository" for file in sorted(names) if file not in files}
        check_assigned(root / index_file, assigned, absent, headers)
    tensors, sub_byte, stray = place_tensors(headers, assigned, lambda file: local.get(file, root / file))
    if not list_sub_byte:
        refuse_sub_byte(root, sub_byte)
    listed = [(name, "") for name in sorted(files)]
    unread, side = sort_files(root, listed, {CONFIG, *headers}, index_file)
    return HubCheckpoint(
        root, config, config_bytes, tensors, sub_byte, index_file, tuple(headers), unread, stray, side,
        repository.repo_id, revision, repository.commit, repository,
    )  # fmt: skip


def _headers(
    repository: Repository, wanted: Mapping[str, list[str]], workers: int
) -> tuple[dict[str, Path], dict[str, dict[str, HeaderEntry]]]:
    """(files that lie in the cache, header of each file); `wanted` has the names each should hold."""
    local = {file: path for file in wanted if (path := repository.cached(file))}
    ranges = Ranges(repository)

    def read(file: str) -> dict[str, HeaderEntry]:
        if file in local:
            return read_header(local[file]).tensors
        return _remote_header(ranges, repository, file, wanted[file])

    with ThreadPoolExecutor(max(1, workers)) as pool:
        jobs = {file: pool.submit(read, file) for file in wanted}
        try:
            return local, {file: job.result() for file, job in jobs.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _remote_header(
    ranges: Ranges, repository: Repository, file: str, names: list[str]
) -> dict[str, HeaderEntry]:
    path, size = repository.root / file, repository.files[file].size
    # Where the index tells about how long the header is, one request mostly does.
    guess = 100 + sum(len(json.dumps(name)) + 78 for name in names) if names else 8
    head = ranges.read(file, 0, min(size, guess))
    end = 8 + header_nbytes(head[:8], size, path)
    if end > len(head):
        head += ranges.read(file, len(head), end - len(head))
    return check_header(BytesIO(head), size, path).tensors


def _from_cache(repo_id: str, revision: str | None, list_sub_byte: bool) -> HubCheckpoint:
    """The checkpoint as the cache has it, which must be all of it."""
    found = library().try_to_load_from_cache(repo_id, CONFIG, revision=revision or "main")
    fix = f"unset HF_HUB_OFFLINE, or `hf download {repo_id}` where there is a network"
    if not isinstance(found, str):
        raise CheckpointError(
            "offline mode is on, and the repository is not in the cache",
            where=f"hf:/{repo_id}" + (f"@{revision}" if revision else ""),
            fix=fix,
        )
    root = Path(found).parent
    try:
        local = open_hf(root, list_sub_byte=list_sub_byte)
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
        raise CheckpointError(f"offline mode is on, and the cache lacks a part: {error}", fix=fix) from None
    return HubCheckpoint(
        local.root, local.config, local.config_bytes, local.tensors, local.sub_byte, local.index_file,
        local.weight_files, local.unread_files, local.stray_tensors, local.side_files,
        repo_id, revision, root.name, None,
    )  # fmt: skip
