"""Where a Megatron checkpoint's config.json comes from, and how its Hugging Face side is spelled."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from convtools.conversion.megatron_target import SPELLING_FILE
from convtools.errors import CheckpointError, ConfigError
from convtools.families.registry import Family, families, language_model, load_family
from convtools.families.wrapping import Wrapping
from convtools.stores.hf import read_config, side_files
from convtools.stores.json_file import read_json
from convtools.stores.names import tick
from convtools.stores.regular_file import open_regular

_RUN_CONFIG_NBYTES = 20_000_000

Shapes = dict[str, tuple[int, ...]]


class HFSide(NamedTuple):
    """The Hugging Face side of a Megatron checkpoint."""

    config: dict[str, Any]
    """The language model's own."""
    config_bytes: bytes
    """config.json, the whole of it."""
    family: Family
    root: Path | None
    """Folder of its other files."""
    files: tuple[str, ...]
    spelling: dict[str, Any] | None
    """As the checkpoint's own note says."""
    wrapping: Wrapping
    origin: str
    """Where config.json came from, for the report."""


def hf_side(folder: Path, hf_config: Path | None, args: dict[str, Any], shapes: Shapes) -> HFSide:
    """`--hf-config`, else the kept `hf/`, else `run_config.yaml`, else Megatron's args.

    Raises ConfigError, listing what could not be derived.
    """
    if args.get("rotary_interleaved") and args.get("position_embedding_type") != "none":
        raise ConfigError(
            "`rotary_interleaved` is set: the rows of q and k are in another order than Hugging Face's",
            where="Megatron's args",
            fix="no table reorders them: convert a checkpoint that was trained without --rotary-interleaved",
        )
    kept = folder / "hf"
    if kept.is_symlink():
        raise CheckpointError("`hf` is a link: it may lead anywhere, and is not followed", where=kept)
    if hf_config is not None or os.path.lexists(kept):
        root = hf_config if hf_config is not None else kept
        if hf_config is not None and root.is_file():
            root = root.parent
        config_bytes, config = read_config(root)
        names = tuple(n for n in side_files(root) if n != SPELLING_FILE)
        origin = f"--hf-config {hf_config}" if hf_config is not None else f"kept in {folder.name}/hf"
        note = _note(kept / SPELLING_FILE) if hf_config is None else {}
        found = language_model(config)
        wrapping = _wrapping(note.get("wrapping"), found.section, root)
        own = found.wrapped(wrapping).config
        return HFSide(own, config_bytes, found.family, root, names, note.get("spelling"), wrapping, origin)
    run_config = folder / "run_config.yaml"
    if os.path.lexists(run_config):
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
            return HFSide(config, text, family, None, (), None, Wrapping(), f"derived from {origin}")
        problems.append(f"{name}: {', '.join(name[:200] for name in missing[:20])}")
    near = [text for text in problems if "another architecture" not in text]  # or that is most of the lines
    raise ConfigError(
        f"config.json cannot be derived from {origin}",
        expected="every field the model needs",
        found="not derivable: " + "; ".join(near or problems),
        fix="pass --hf-config DIR, a folder with the model's config.json (weights are not needed there)",
    )


def _note(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    _, note = read_json(path, 100_000, constants=False)
    spellings = (note.get("spelling"), note.get("wrapping", {}))
    if note.get("version") != 1 or not all(isinstance(spelling, dict) for spelling in spellings):
        raise CheckpointError("the note of the Hugging Face spelling has an unknown version", where=path)
    return note


def _wrapping(note: dict[str, Any] | None, section: str | None, root: Path) -> Wrapping:
    """How the names were prefixed; raises ConfigError where only a guess could say."""
    if note is None and section is not None:
        raise ConfigError(
            f"config.json holds a language model in {tick(section)}, and no note says how its names begin",
            where=root,
            fix=f"pass --hf-config with a config.json of the language model alone: the part {tick(section)}, "
            "with its `architectures`",
        )
    wrapping: Wrapping = spelled(Wrapping(), note)
    return wrapping


def spelled(default: Any, note: dict[str, Any] | None) -> Any:
    """The family's spelling with the fields of a note; raises CheckpointError for strange ones."""
    if note is None:
        return default
    try:
        return type(default)(**note)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the note of the Hugging Face spelling (hf/{SPELLING_FILE}) is damaged: {tick(str(error))}",
            fix="remove the note to use the published spelling",
        ) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    file, size = open_regular(path)
    with file:
        if size > _RUN_CONFIG_NBYTES:
            raise CheckpointError("run_config.yaml is too large to be one", where=path)
        data = file.read(_RUN_CONFIG_NBYTES)

    class Inert(yaml.SafeLoader):
        """Knows plain values only."""

    # Python objects in the file (enums, dtypes, partials) become None: nothing of them is built.
    Inert.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    try:
        found = yaml.load(data, Loader=Inert)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"run_config.yaml cannot be read: {tick(str(error))}", where=path) from None
    if not isinstance(found, dict):
        raise CheckpointError("run_config.yaml is not a mapping", where=path)
    plain = _without_aliases(found)
    if plain is None:
        raise CheckpointError("run_config.yaml unfolds into far more values than it holds", where=path)
    return plain


def _without_aliases(found: dict[str, Any]) -> dict[str, Any] | None:
    """The same as a tree; None where aliases make it larger than any real run_config is."""
    left = 100_000

    def walk(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > 50:
            raise OverflowError
        if isinstance(value, dict):
            return {str(k): walk(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple | set):
            return [walk(v, depth + 1) for v in value]
        return value

    try:
        plain: dict[str, Any] = walk(found, 0)
    except OverflowError:
        return None
    return plain
