"""What someone gives as a side: a path that is not there, or a file in the place of its folder."""

from pathlib import Path

from convtools.errors import UsageError
from convtools.stores.names import tick

_OF_FOLDERS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""JSON files that lie in a checkpoint's folder and are no manifest."""


def check_given(path: Path, given: str, manifest: bool = True) -> None:
    """Raise UsageError for a path that is not there, and for a file of a checkpoint in its folder's place.

    `manifest`: whether one would do.
    """
    if path.is_dir():
        return
    if not path.exists():
        from convtools.stores.hub import parse_repo

        if path.suffix == ".json" or parse_repo(given) is None:
            raise UsageError(
                f"there is no {'file' if path.suffix == '.json' else 'folder'} {tick(given)}",
                expected=f"a checkpoint's folder,{' a manifest (.json),' * manifest} "
                "or org/name[@revision] on the Hub",
            )
        return
    if path.suffix != ".json" or path.name in _OF_FOLDERS or path.name.endswith(".index.json"):
        raise UsageError(
            f"{tick(given)} is a file",
            expected="a checkpoint's folder" + ", or a manifest (.json)" * manifest,
            fix=f"give its folder: {path.parent}",
        )
