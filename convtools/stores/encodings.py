"""Recognise quantised weights and adapters by name, so that none is ever read as plain numbers.

An FP8 weight cast without its scale is a thousand times off and raises no error anywhere. Both
witnesses are heard, the headers (dtypes, and names that only scales have) and the config
(`quantization_config`), and where they contradict each other that is said. The rules are tight: a
parameter called `scale` beside a bf16 weight is just a parameter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from convtools.errors import UnsupportedEncoding, capped
from convtools.stores.names import tick
from convtools.stores.safetensors_header import SUB_BYTE_BITS

FP8 = "FP8"
NVFP4 = "NVFP4"
MXFP4 = "MXFP4"
INT8 = "INT8 with scales"
GPTQ = "packed INT4 or INT8 (GPTQ/AWQ layout)"
PACKED = "packed INT4 or INT8 (compressed-tensors layout)"
BITSANDBYTES = "bitsandbytes"
MLX = "MLX packed integers"
KV_SCALES = "KV-cache scales"
ADAPTER = "a LoRA/PEFT adapter"
GGUF = "GGUF"
MODELOPT = "a ModelOpt quantisation"
LONE_SCALES = "quantisation scales without quantised weights"
UNKNOWN_8BIT = "an unknown 8-bit encoding"
UNKNOWN_INT = "an unknown integer encoding"

_CLAIMS = (
    ("nvfp4", NVFP4), ("modelopt_fp4", NVFP4), ("mxfp4", MXFP4),
    ("fp8", FP8), ("float-quantized", FP8),
    ("int-quantized", INT8), ("pack-quantized", PACKED),
    ("gptq", GPTQ), ("awq", GPTQ), ("auto-round", GPTQ),
    ("bitsandbytes", BITSANDBYTES), ("mlx", MLX), ("gguf", GGUF),
)  # fmt: skip
_SCALE_SUFFIXES = (
    "_weight_scale_inv", "_weight_scale_2", "_weight_scale",
    "_scale_inv", "_scale_2", "_global_scale", "_scale",
    "_zero_point",
)  # fmt: skip
_ADAPTER_PARTS = frozenset(
    ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
)
_ADAPTER_FILES = frozenset(("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"))
_MODELOPT_FILE = "hf_quant_config.json"
_BYTE = frozenset(("U8", "I8"))
_WIDE_INT = frozenset(("I16", "U16", "I32", "U32", "I64", "U64"))


class TensorHeader(Protocol):
    """What is known of a tensor without its data; a `StoredTensor` is one."""

    @property
    def dtype(self) -> str:
        """Its name in the safetensors format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""


Tensors = Mapping[str, TensorHeader]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding that was recognised, and by what."""

    kind: str
    """Its name, or the config's own word for one that is not known."""
    seen_in: str
    """`headers`, or the file and key that claims it."""
    tensors: tuple[str, ...]
    """The tensors that show it; empty for a claim of the config or of a file's name."""


def refuse_encodings(config: Mapping[str, Any], tensors: Tensors, root_files: Iterable[str]) -> None:
    """Do nothing for plain weights; raise `UnsupportedEncoding` that names the encoding otherwise.

    `root_files` are all files of the folder, the unread ones too (an adapter's weights are among them).
    """
    found = find_encodings(config, tensors, root_files)
    if not found:
        return
    in_headers = {e.kind for e in found if e.seen_in == "headers"}
    claimed = {e.kind for e in found if e.seen_in != "headers"}
    known = {kind for _, kind in _CLAIMS} | {MODELOPT}
    fix = (
        "convert the model's unquantised (bf16) checkpoint; or dequantise it with the tool that made it, "
        "and take the quantisation block out of config.json"
    )
    if ADAPTER in in_headers | claimed:
        what = "the folder holds a LoRA/PEFT adapter, not (only) a model"
        fix = "merge it into its base model first (peft: merge_and_unload), or remove the adapter's files"
    elif not claimed <= known:
        what = f"the config says {_and(claimed - known)}, which is not known here"
    elif tensors and not in_headers:
        what = f"the config says {_and(claimed)}, and the weights are plain numbers: the two disagree"
        fix = (
            "if the weights were dequantised, take the quantisation block out of config.json; "
            "if not, fetch the weights that belong to this config"
        )
    elif claimed - {MODELOPT} and in_headers & known and not claimed & in_headers:
        what = f"the config says {_and(claimed)}, the headers say {_and(in_headers)}: the two disagree"
    else:
        what = f"the weights are encoded: {_and(in_headers or claimed)}. They are not read as plain numbers"
    raise UnsupportedEncoding(what, found="; ".join(map(_describe, found)), fix=fix)


def find_encodings(
    config: Mapping[str, Any], tensors: Tensors, root_files: Iterable[str]
) -> tuple[Encoding, ...]:
    """Every encoding that the headers, the config or a file's name gives away."""
    by_kind: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if kind := _kind(name, tensor, tensors):
            by_kind.setdefault(kind, []).append(name)
    found = [Encoding(kind, "headers", tuple(names)) for kind, names in by_kind.items()]
    found += [Encoding(kind, f"config.json: {where}", ()) for kind, where in _config_claims(config)]
    files = sorted(root_files)
    found += [Encoding(ADAPTER, f"the file {tick(name)}", ()) for name in files if name in _ADAPTER_FILES]
    if _MODELOPT_FILE in files and not any(e.seen_in.startswith("config.json") for e in found):
        found.append(Encoding(MODELOPT, f"the file `{_MODELOPT_FILE}`", ()))
    if not tensors:
        found += [Encoding(GGUF, f"the file {tick(n)}", ()) for n in files if n.lower().endswith(".gguf")]
    return tuple(found)


def _kind(name: str, tensor: TensorHeader, tensors: Tensors) -> str | None:
    """The encoding that this one tensor belongs to, if it gives one away."""
    parent, _, last = name.rpartition(".")
    dtype = tensor.dtype
    if dtype in SUB_BYTE_BITS:
        return f"the sub-byte dtype {dtype}"
    if name.startswith("base_model.model.") or not _ADAPTER_PARTS.isdisjoint(name.split(".")):
        return ADAPTER
    if kind := _kind_by_name(parent, last, dtype, tensors):
        return kind
    if kind := _kind_of_scale(name, parent, last, tensors):
        return kind
    if dtype.startswith("F8_"):
        return FP8
    matrix = len(tensor.shape) >= 2 and (last == "weight" or last.endswith(("_proj", "_weight")))
    return _kind_of_integers(name, parent, dtype, tensors) if matrix else None


def _kind_by_name(parent: str, last: str, dtype: str, tensors: Tensors) -> str | None:
    """Encodings whose tensors have names of their own."""
    if last == "qweight" and dtype not in ("F16", "BF16", "F32"):
        return GPTQ
    if last in ("qzeros", "scales", "g_idx") and f"{parent}.qweight" in tensors:
        return GPTQ
    if last == "weight_packed":
        return _kind_of_packed(parent, tensors)
    if last == "weight_shape" and f"{parent}.weight_packed" in tensors:
        return PACKED
    for end, other in (("_blocks", "_scales"), ("_scales", "_blocks")):
        if last.endswith(end) and dtype == "U8":
            partner = tensors.get(f"{parent}.{last.removesuffix(end)}{other}".removeprefix("."))
            if partner is not None and partner.dtype == "U8":
                return MXFP4
    if last.startswith("bitsandbytes__"):
        return BITSANDBYTES
    if last in ("absmax", "quant_map", "nested_absmax", "nested_quant_map") and parent in tensors:
        return BITSANDBYTES
    if last == "SCB" and f"{parent}.weight" in tensors:
        return BITSANDBYTES
    projection = parent.endswith(("k_proj", "v_proj"))
    if last in ("k_scale", "v_scale"):
        both = f"{parent}.k_scale" in tensors and f"{parent}.v_scale" in tensors
        return KV_SCALES if both or projection else None
    if last == "kv_scale" and "attn" in parent:
        return KV_SCALES
    return KV_SCALES if last == "output_scale" and projection else None


def _kind_of_packed(parent: str, tensors: Tensors) -> str:
    """The encoding of `<parent>.weight_packed`, told by its scales."""
    scale = tensors.get(f"{parent}.weight_scale")
    if scale is not None and scale.dtype in ("U8", "F8_E8M0"):
        return MXFP4
    return NVFP4 if f"{parent}.weight_global_scale" in tensors else PACKED


def _kind_of_scale(name: str, parent: str, last: str, tensors: Tensors) -> str | None:
    """The encoding of the weight that `name` is a scale of, if it is the scale of a weight."""
    if last == "scale":
        return _kind_of_scaled(f"{parent}.weight", tensors)
    suffix = next((s for s in _SCALE_SUFFIXES if last.endswith(s) and last != s), None)
    if suffix is None:
        return None
    if kind := _kind_of_scaled(name.removesuffix(suffix), tensors):
        return kind
    if last == f"weight{suffix}":
        return _kind_of_packed(parent, tensors) if f"{parent}.weight_packed" in tensors else LONE_SCALES
    return LONE_SCALES if suffix.endswith("_scale_inv") else None


def _kind_of_scaled(name: str, tensors: Tensors) -> str | None:
    """The encoding of weight `name`, where it is there and one byte wide."""
    weight = tensors.get(name)
    if weight is None:
        return None
    if weight.dtype.startswith("F8_"):
        return FP8
    parent = name.rpartition(".")[0]
    return _kind_of_integers(name, parent, weight.dtype, tensors) if weight.dtype in _BYTE else None


def _kind_of_integers(name: str, parent: str, dtype: str, tensors: Tensors) -> str | None:
    """The encoding of a weight matrix of integers, told by its scale."""
    if dtype in _WIDE_INT:
        return MLX if dtype == "U32" and f"{parent}.scales" in tensors else UNKNOWN_INT
    if dtype not in _BYTE:
        return None
    if f"{name}.absmax" in tensors or f"{parent}.SCB" in tensors:
        return BITSANDBYTES
    scales = [f"{name}{suffix}" for suffix in _SCALE_SUFFIXES] + [f"{parent}.scale"]
    dtypes = {tensors[scale].dtype for scale in scales if scale in tensors}
    if "F8_E4M3" in dtypes or f"{name}_scale_2" in tensors:
        return NVFP4
    if dtypes & {"F8_E8M0", "U8"}:
        return MXFP4
    return INT8 if dtype == "I8" and dtypes else UNKNOWN_8BIT


def _config_claims(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, where and what) of every quantisation block in `config`, nested ones too."""
    pending: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while pending:
        prefix, block = pending.pop(0)
        for key, value in block.items():
            if value is None:
                continue
            path = f"{prefix}{key}"
            if key in ("quantization_config", "compression_config"):
                yield _claim(path, value)
            elif key == "quantization" and isinstance(value, dict) and {"bits", "group_size"} & set(value):
                yield MLX, f"{tick(path)} (bits {tick(value.get('bits'))})"
            elif isinstance(value, dict):
                pending.append((f"{path}.", value))


def _claim(path: str, block: object) -> tuple[str, str]:
    """What one quantisation block says it is; an unknown one goes by its own word."""
    if not isinstance(block, dict):
        return f"a quantisation {tick(block)}", tick(path)
    if not {"quant_method", "quant_algo"} & set(block) and {"bits", "group_size"} <= set(block):
        return MLX, f"{tick(path)} (bits {tick(block['bits'])})"
    keys = [key for key in ("format", "quant_algo", "quant_method", "bits") if block.get(key) is not None]
    said = ", ".join(f"{key} {tick(block[key])}" for key in keys) or "no quant_method"
    words = " ".join(tick(block[key]) for key in keys).lower()
    kind = next((kind for needle, kind in _CLAIMS if needle in words), f"a quantisation with {said}")
    return kind, f"{tick(path)} ({said})"


def _and(kinds: Iterable[str]) -> str:
    return " and ".join(sorted(kinds))


def _describe(encoding: Encoding) -> str:
    if not encoding.tensors:
        return encoding.seen_in
    return f"{encoding.kind} in the headers: {capped(map(tick, encoding.tensors), 4)}"
