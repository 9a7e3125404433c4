"""What `huggingface_hub` raises, in words that say what to do; and the library itself, if it is there."""

import sys
from typing import Any

from convtools.errors import CheckpointError, ConvtoolsError, UsageError
from convtools.stores.names import tick

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def library() -> Any:
    """The module `huggingface_hub`. Raises UsageError, which names the extra, where there is none."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise UsageError(
            "the Hugging Face Hub needs the package `huggingface_hub`",
            found=str(error),
            fix="pip install -e '.[hub]' in convtools' source tree",
        ) from None
    if not hasattr(huggingface_hub, "close_session"):  # before 1.0 it spoke through requests
        raise UsageError(
            "this `huggingface_hub` is too old",
            found=huggingface_hub.__version__,
            fix="pip install -U -e '.[hub]' in convtools' source tree",
        )
    return huggingface_hub


def quiet() -> None:
    """Have it show no bars of its own, unless the user's HF_HUB_DISABLE_PROGRESS_BARS asks for them."""
    hub = library()
    if hub.constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        hub.utils.disable_progress_bars()


def transport_errors() -> tuple[type[Exception], ...]:
    """What its HTTP client raises where no whole answer arrives."""
    library()
    return tuple(module.TransportError for module in _clients())


def _clients() -> list[Any]:
    return [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]


def hub_errors() -> tuple[type[Exception], ...]:
    """All that a call of it raises for the network's, the server's or the user's part."""
    errors = library().errors
    return (
        errors.HfHubHTTPError,
        errors.EntryNotFoundError,
        errors.FileMetadataError,
        errors.LocalTokenNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HFValidationError,
        *(kind for module in _clients() for kind in (module.RequestError, module.InvalidURL)),
    )


def explain(error: BaseException, where: str, kind: type[ConvtoolsError] = CheckpointError) -> ConvtoolsError:
    """An error of ours for one of theirs; `where` names the repository or file."""
    hub = library()
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # it could not ask the Hub, and has no copy
    status = getattr(getattr(error, "response", None), "status_code", None)
    found = f"HTTP {status}" if status else None
    if isinstance(error, errors.HFValidationError):
        return UsageError("not the name of a repository", found=tick(where), expected="`org/name`")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return kind("offline mode is on", where=where, fix="unset HF_HUB_OFFLINE")
    if isinstance(error, errors.LocalTokenNotFoundError):
        return kind("no access token", where=where, fix=LOG_IN)
    if isinstance(error, errors.GatedRepoError):
        fix = f"ask for access on its page on {endpoint}, then {LOG_IN}"
        return kind(
            "the repository is gated, and this account has no access", where=where, found=found, fix=fix
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return kind("the repository has no such revision", where=where, found=found, fix="give one it has")
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = f"check its name; if it is private, {LOG_IN}"
        return kind("no such repository, or no right to see it", where=where, found=found, fix=fix)
    if isinstance(error, errors.EntryNotFoundError):
        return kind("the repository has no such file", where=where, found=found)
    if status in (401, 403):
        said = getattr(error, "server_message", None)
        fix = f"use a token with the right to do this: {LOG_IN}"
        return kind("the Hub refuses access", where=where, found=f"{found} {said or ''}".strip(), fix=fix)
    if status == 429:
        return kind(
            "the Hub limits how often it may be asked", where=where, found=found, fix="wait, run again"
        )
    if status:
        said = getattr(error, "server_message", None) or ""
        return kind("the Hub answered with an error", where=where, found=f"{found} {said}"[:500].strip())
    return kind(
        f"cannot reach the Hub at {endpoint}",
        where=where,
        found=f"{type(error).__name__}: {error}"[:500],
        fix="look at the network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 reads what is in the cache",
    )
