"""What a server says of itself, as far as it decides what its digests can be compared with.

A digest that is the expected one proves that the bytes are; another digest proves a difference only where it
is known how SGLang keeps the parameter. So everything that may change that is looked for here.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from convtools.errors import tick
from convtools.refit.errors import PeerError, RefitError
from convtools.refit.protocol import CLEAN
from convtools.refit.sinks.sglang_http import HttpClient
from convtools.refit.sinks.sglang_local import is_here
from convtools.refit.sinks.sglang_names import DRAFT, quantised
from convtools.refit.sinks.sglang_server import MAX_RANKS, TESTED, SGLangServer, read_mark

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
_ONE = (
    "pp_size", "dp_size", "nnodes", "ep_size", "attn_cp_size", "moe_dp_size", "dcp_size", "attn_dp_size",
    "dwdp_size",
)  # fmt: skip
_OFF = (
    "enable_dp_attention", "enable_dp_lm_head", "enable_eplb", "ep_num_redundant_experts",
    "moe_dense_tp_size", "enable_lora",
    "lora_paths", "cpu_offload_gb", "kt_weight_path", "quantization",
    "torchao_config", "modelopt_quant", "quantize_and_serve",
    "rl_quant_profile", "enable_fp32_lm_head", "shared_experts_tp_size", "enable_shared_experts_attn_tp",
    "enable_dense_mlp_attn_tp", "enable_paged_experts", "dcp_replicate_q_proj", "custom_weight_loader",
    "enable_layernorm_sp",
)  # fmt: skip
_PLAIN = {"moe_a2a_backend": "none", "init_expert_location": "trivial", "json_model_override_args": "{}",
          "weight_cache_mode": "off"}  # fmt: skip


class Facts(NamedTuple):
    """A server, and the digests of its parameters."""

    architecture: str
    tp: int
    dtype: str | None
    """What its parameters are kept in; None: the model's config says, which is not seen."""
    version: str
    """What it says that it serves: a trainer's step, or anyone's text."""
    start: str
    """Another one after every start."""
    ranks: tuple[dict[str, str], ...]
    blind: str
    """Why no digest can be compared at all; empty."""
    doubts: tuple[str, ...]
    """Why another digest proves nothing."""
    packs: bool
    """Whether its processor may make SGLang pack matrices."""

    @property
    def known(self) -> dict[str, str]:
        """The parameters of the first rank, without a draft model's."""
        return {name: value for name, value in self.ranks[0].items() if not DRAFT.match(name)}

    @property
    def draft(self) -> bool:
        """Whether it serves a draft model too."""
        return any(DRAFT.match(name) for name in self.ranks[0])


def ask(client: HttpClient, server: SGLangServer, timeout: float) -> Facts:
    """Raises PeerError where it does not answer, RefitError where what it holds is no version."""
    info = server.server_info()
    before = standing(client, timeout)
    model = client.get("/model_info", timeout)
    tp, names = info.get("tp_size"), model.get("architectures")
    if type(tp) is not int or not 1 <= tp <= MAX_RANKS:
        raise PeerError("this is no SGLang server", found=f"tp_size {tick(str(tp)[:40])}")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    ranks = server.checksums()
    after = standing(client, timeout)
    if before != after:
        raise RefitError("it took other weights while it was asked", expected=before[0], found=after[0])
    if len(ranks) != tp or any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise RefitError(
            "the server's ranks do not have one set of parameters", expected=tp, found=f"{len(ranks)} ranks"
        )
    device, dtype = info.get("device"), info.get("dtype")
    blind = ""
    if device != "cpu":
        blind = f"SGLang on {tick(str(device)[:40])} digests its parameters by another hash than on a CPU"
    return Facts(
        architecture[:200], tp, _DTYPES.get(dtype) if isinstance(dtype, str) else None, *before, tuple(ranks),
        blind, tuple(_doubts(info, ranks[0])), not is_here(client.base.host) or _has_amx(),
    )  # fmt: skip


def standing(client: HttpClient, timeout: float) -> tuple[str, str]:
    """(version, start). Raises RefitError while an update of ours is under way, or did not end."""
    text = client.get("/model_info", timeout).get("weight_version")
    info = client.get("/server_info", timeout)
    start = repr((info.get("startup_time"), info.get("launch_command")))
    if isinstance(text, str) and text.startswith("convtools "):
        mark = read_mark(text)
        if mark.state != CLEAN:
            raise RefitError(
                f"it is {mark.state}: what it holds is no version", found=mark.text,
                fix="wait until the push is over, or push all weights again",
            )  # fmt: skip
    shown = "0" if text == "default" else str(text)[:80]
    return (shown if shown.isprintable() else repr(shown)), start


def _doubts(info: dict[str, Any], known: dict[str, str]) -> list[str]:
    found = []
    if (version := info.get("version")) not in TESTED:
        found.append(f"it is SGLang {str(version)[:40]}, whose parameters were not looked at")
    odd = [key for key in _ONE if info.get(key, 1) not in (1, None)]
    odd += [key for key in _OFF if info.get(key) not in (None, False, 0, "", [], {})]
    odd += [key for key, value in _PLAIN.items() if info.get(key, value) not in (value, None)]
    found += [f"it is served with {key} {str(info[key])[:40]}" for key in odd]
    if quantised(known):
        found.append("its layers are quantised")
    return found


def _has_amx() -> bool:
    """Whether this machine's processor may; SGLang packs matrices for it. Also where that cannot be seen."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        return "flags" not in flags or re.search(r"\bamx_tile\b", flags) is not None
    return True


__all__ = ["Facts", "ask", "standing"]
