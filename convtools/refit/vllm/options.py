"""What vLLM is started with so that it can be refitted, and what of it cannot be refitted yet."""

import os
from pathlib import Path
from typing import Any

from convtools.errors import UsageError
from convtools.refit.vllm.control import ENGINE

EXTENSION = "convtools.refit.vllm.extension.RefitExtension"
SCHEDULER = "convtools.refit.vllm.scheduler.make_scheduler"
BACKEND = "convtools"
DIRECTORY = "convtools_refit"
"""Key of vLLM's `additional_config` under which the socket directory stands."""
DRAIN = "convtools_refit_drain"
"""And the seconds that requests in flight may take."""
VARIABLE = "CONVTOOLS_REFIT_DIR"
"""Environment variable that names the directory instead."""


def engine_arguments(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments for `vllm.LLM`, or for `vllm.AsyncEngineArgs`, that open the refit sockets in `directory`.

    >>> sorted(engine_arguments("/run/refit"))
    ['additional_config', 'scheduler_cls', 'weight_transfer_config', 'worker_extension_cls']
    """
    return {
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "weight_transfer_config": {"backend": BACKEND},
        "additional_config": {DIRECTORY: os.fspath(directory)},
    }


def rank_directory(directory: Path, rank: int) -> Path:
    """Where a worker's socket lies."""
    return directory / f"rank-{rank}"


def control_directory(directory: Path) -> Path:
    """Where the scheduler's socket lies."""
    return directory / ENGINE


def directory_of(config: Any) -> Path:
    """The socket directory that a `VllmConfig` names. Raises UsageError where there is none."""
    extra = config.additional_config if isinstance(config.additional_config, dict) else {}
    found = extra.get(DIRECTORY) or os.environ.get(VARIABLE)
    if not found:
        raise UsageError(
            "vLLM was not told where its refit sockets go",
            fix=f'--additional-config \'{{"{DIRECTORY}": "/a/directory"}}\', or {VARIABLE} where it starts',
        )
    return Path(found).absolute()


def drain_of(config: Any) -> float:
    """Seconds that requests in flight may take. Raises UsageError."""
    extra = config.additional_config if isinstance(config.additional_config, dict) else {}
    found = extra.get(DRAIN, 30.0)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 3600:
        raise UsageError(f"`{DRAIN}` is in seconds", expected="0 to 3600", found=repr(found))
    return float(found)


def check_refittable(config: Any) -> None:
    """Raises UsageError, by name, for what an engine does that a push would not reach, or not safely."""
    parallel = config.parallel_config
    if config.scheduler_config.scheduler_cls != SCHEDULER:
        raise UsageError(
            "vLLM's own scheduler goes on generating while weights change",
            found=f"scheduler_cls {config.scheduler_config.scheduler_cls!r}",
            fix=f"--scheduler-cls {SCHEDULER}",
        )
    problems = {
        "pipeline_parallel_size above 1": parallel.pipeline_parallel_size > 1,
        "data_parallel_size above 1": parallel.data_parallel_size > 1,
        "expert load balancing": getattr(parallel, "enable_eplb", False),
        "quantisation": config.quant_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "a multimodal model": config.model_config.is_multimodal_model,
        "KV transfer": config.kv_transfer_config is not None,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise UsageError(
            "a refit of such an engine was never tried, and is refused",
            found=", ".join(found),
            fix="start it without, or without the refit options",
        )
