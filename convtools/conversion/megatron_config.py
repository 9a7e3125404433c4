"""Where a Megatron checkpoint's config.json comes from, and how its Hugging Face side is spelled."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from convtools.conversion.megatron_target import SPELLING_FILE
from convtools.errors import CheckpointError, ConfigError
from convtools.families.registry import Family, families, find_family, load_family
from convtools.stores.hf import read_config, side_files

_RUN_CONFIG_NBYTES = 20_000_000

Shapes = dict[str, tuple[int, ...]]


class HFSide(NamedTuple):
    """The Hugging Face side of a Megatron checkpoint."""

    config: dict[str, Any]
    config_bytes: bytes
    family: Family
    root: Path | None
    """Folder of its other files."""
    files: tuple[str, ...]
    spelling: dict[str, Any] | None
    """As the checkpoint's own note says."""
    origin: str
    """Where config.json came from, for the report."""


def hf_side(folder: Path, hf_config: Path | None, args: dict[str, Any], shapes: Shapes) -> HFSide:
    """`--hf-config`, else the kept `hf/`, else `run_config.yaml`, else Megatron's args.

    Raises ConfigError, listing what could not be derived.
    """
    kept = folder / "hf"
    if hf_config is not None or (kept / "config.json").is_file():
        root = hf_config if hf_config is not None else kept
        if hf_config is not None and root.is_file():
            root = root.parent
        config_bytes, config = read_config(root)
        names = tuple(n for n in side_files(root) if n != SPELLING_FILE)
        note = _note(kept / SPELLING_FILE) if hf_config is None else None
        return HFSide(
            config, config_bytes, find_family(config), root, names, note, f"{root.name}/config.json"
        )
    run_config = folder / "run_config.yaml"
    if run_config.is_file():
        model = _read_yaml(run_config).get("model")
        if not isinstance(model, dict):
            raise CheckpointError("run_config.yaml has no `model` section", where=run_config)
        return _derived(model | {"bf16": model.get("bf16", True)}, shapes, "run_config.yaml")
    return _derived(args, shapes, "Megatron's args")


def _derived(args: dict[str, Any], shapes: Shapes, origin: str) -> HFSide:
    problems = []
    for name in families():
        family = load_family(name)
        config, missing = family.hf_config(args, shapes)
        if not missing:
            text = json.dumps(config, indent=2).encode() + b"\n"
            return HFSide(config, text, family, None, (), None, f"derived from {origin}")
        problems.append(f"{name}: {', '.join(missing)}")
    raise ConfigError(
        f"config.json cannot be derived from {origin}",
        expected="every field the model needs",
        found="not derivable: " + "; ".join(problems),
        fix="pass --hf-config DIR, a folder with the model's config.json (weights are not needed there)",
    )


def _note(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    if path.stat().st_size > 100_000:
        raise CheckpointError("the note of the Hugging Face spelling is too large", where=path)
    try:
        note = json.loads(path.read_bytes())
        spelling = note["spelling"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the note of the Hugging Face spelling is damaged: {error}", where=path
        ) from None
    if note.get("version") != 1 or not isinstance(spelling, dict):
        raise CheckpointError("the note of the Hugging Face spelling has an unknown version", where=path)
    return spelling


def spelled(default: Any, note: dict[str, Any] | None) -> Any:
    """The family's spelling with the fields of a note; raises CheckpointError for strange ones."""
    if note is None:
        return default
    known = {f.name for f in fields(default)}
    odd = [k for k, v in note.items() if k not in known or not (v is None or isinstance(v, str | bool | int))]
    if odd:
        raise CheckpointError(
            f"the note of the Hugging Face spelling has strange fields: {', '.join(map(str, odd))}"
        )
    return type(default)(**note)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    if path.stat().st_size > _RUN_CONFIG_NBYTES:
        raise CheckpointError("run_config.yaml is too large to be one", where=path)

    class Inert(yaml.SafeLoader):
        """Knows plain values only."""

    # Python objects in the file (enums, dtypes, partials) become None: nothing of them is built.
    Inert.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    try:
        found = yaml.load(path.read_bytes(), Loader=Inert)
    except yaml.YAMLError as error:
        raise CheckpointError(f"run_config.yaml cannot be read: {error}", where=path) from None
    if not isinstance(found, dict):
        raise CheckpointError("run_config.yaml is not a mapping", where=path)
    return found
