"""A repository on the Hub to publish to: who may, what is there, and the calls that change it."""

import glob
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from convtools.errors import CheckpointError, StorageError, UsageError, capped
from convtools.stores.hf_index import WEIGHTS
from convtools.stores.hub_errors import LOG_IN, library
from convtools.stores.hub_files import Repository, check_repo_id, find_repository
from convtools.stores.hub_http import Patience, patiently
from convtools.stores.names import tick

_T = TypeVar("_T")
_BRANCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}")


@dataclass(frozen=True, slots=True)
class Destination:
    """A repository that this account may write to, as far as can be known without trying."""

    repo_id: str
    branch: str
    private: bool
    api: Any
    """`huggingface_hub.HfApi`."""
    exists: bool
    has_branch: bool
    files: tuple[str, ...]
    """What the branch has."""

    @property
    def url(self) -> str:
        """Its page."""
        page = f"{library().constants.ENDPOINT}/{self.repo_id}"
        return page if self.branch == "main" else f"{page}/tree/{self.branch}"

    def stale(self, names: Iterable[str]) -> list[str]:
        """Weights and indexes that it has, and that are not among `names`."""
        return sorted(name for name in {*self.files} - {*names} if WEIGHTS.fullmatch(name))

    def create(self) -> bool:
        """Make the repository and the branch where they are not there; whether the repository is new."""
        if not self.exists:
            private = True if self.private else None  # None: as the organisation has it
            _ask(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True), self.repo_id)
        if not self.has_branch:
            _ask(
                lambda: self.api.create_branch(self.repo_id, branch=self.branch, exist_ok=True), self.repo_id
            )
        return not self.exists

    def upload(self, root: Path, names: Iterable[str]) -> None:
        """Send the files that it does not have; raises what huggingface_hub raises."""
        patterns = [glob.escape(name) for name in names]
        if hasattr(self.api, "upload_large_folder"):  # until 2.0; then upload_folder took over its work
            self.api.upload_large_folder(
                repo_id=self.repo_id,
                repo_type="model",
                folder_path=root,
                revision=self.branch,
                allow_patterns=patterns,
                print_report=False,
            )
            return
        self.api.upload_folder(
            repo_id=self.repo_id,
            folder_path=root,
            revision=self.branch,
            allow_patterns=patterns,
            commit_message="Upload with convtools publish",
        )

    def delete(self, names: list[str]) -> None:
        """Delete files; raises what huggingface_hub raises."""
        deletions = [library().CommitOperationDelete(path_in_repo=name, is_folder=False) for name in names]
        self.api.create_commit(
            self.repo_id,
            operations=deletions,
            revision=self.branch,
            commit_message="Remove weights of an earlier upload",
        )

    def listing(self) -> Repository:
        """What it has now. Raises StorageError."""
        try:
            return find_repository(self.repo_id, self.branch)
        except CheckpointError as error:
            raise StorageError(error.what, where=error.where, found=error.found, fix=error.fix) from None


def check_destination(repo_id: str, revision: str | None) -> str:
    """The branch to publish to. Raises UsageError for names that cannot be; asks nobody."""
    check_repo_id(repo_id)
    branch = revision or "main"
    if not _BRANCH.fullmatch(branch) or ".." in branch:
        raise UsageError("not the name of a branch", found=tick(branch))
    return branch


def find_destination(repo_id: str, revision: str | None, private: bool) -> Destination:
    """Look at the account and the repository; changes nothing.

    Raises UsageError for names that cannot be; StorageError without network, without rights, and where
    a repository is public that should be private.
    """
    branch = check_destination(repo_id, revision)
    hub = library()
    if hub.constants.HF_HUB_OFFLINE:
        raise StorageError("offline mode is on: nothing can be published", fix="unset HF_HUB_OFFLINE")
    api = hub.HfApi(library_name="convtools")
    _check_account(_ask(api.whoami, "your account"), repo_id.partition("/")[0])
    missing = (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError)

    def look(at: str | None) -> Any:
        try:
            return api.model_info(repo_id, revision=at, timeout=60.0)
        except missing as error:
            if isinstance(error, hub.errors.GatedRepoError):
                raise
            return None

    info = _ask(lambda: look(None), repo_id)
    on_branch = _ask(lambda: look(branch), repo_id) if info is not None else None
    if info is not None and private and not info.private:
        raise StorageError(
            "the repository is there already, and is public",
            where=repo_id,
            expected="a private one, as --private asks",
            fix="make it private in its settings, or publish to a new one",
        )
    files = tuple(one.rfilename for one in (on_branch.siblings or [])) if on_branch is not None else ()
    has_branch = branch == "main" or on_branch is not None
    return Destination(repo_id, branch, private, api, info is not None, has_branch, files)


def _check_account(account: dict[str, Any], namespace: str) -> None:
    """Raise StorageError where it is already clear that this token may not write there."""
    token = (account.get("auth") or {}).get("accessToken") or {}
    role = token.get("role")
    if role == "read":
        raise StorageError("the access token may only read", expected="a token that may write", fix=LOG_IN)
    roles = {org.get("name"): org.get("roleInOrg") for org in account.get("orgs") or []}
    own = {account.get("name"), *roles}
    if namespace not in own and role == "write":  # other kinds of tokens do not list all that they may
        raise StorageError(
            f"this account may not publish under `{namespace}`",
            expected=capped(sorted(map(str, own))),
            fix="publish under one of these, or log in with another account",
        )
    if roles.get(namespace) == "read":
        raise StorageError(f"this account may only read in `{namespace}`", fix="ask one of its admins")


def _ask(call: Callable[[], _T], where: str) -> _T:
    return patiently(call, Patience(), threading.Event(), where=where, kind=StorageError)
