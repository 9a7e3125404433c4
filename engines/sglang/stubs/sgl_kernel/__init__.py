"""Test only. In place of SGLang's kernels, of which there is no build for a CPU.

Models run on SGLang's own fallbacks in plain torch; where a model has none (Nemotron-H), the kernels of
`nemotron_cpu` are put in their place. Everything else of SGLang is its own: models, loaders, weight updates.
"""

import sys

import nemotron_cpu
import torch
from absent import Absent, AbsentModules, attribute

__version__ = "0.4.10+stub"
__path__: list[str] = []
__getattr__ = attribute


class _Operators:
    """`torch.ops.sgl_kernel`: only what is read while SGLang is imported; probes must find nothing."""

    _READ_AT_IMPORT = frozenset({"fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"})

    def __getattr__(self, name: str) -> Absent:
        if name not in self._READ_AT_IMPORT:
            raise AttributeError(name)
        return Absent(f"torch.ops.sgl_kernel.{name}")


# Without scalar_type, SGLang uses a version of its own.
sys.meta_path.append(AbsentModules(__name__, missing={"sgl_kernel.scalar_type"}))
torch.ops.sgl_kernel = _Operators()
nemotron_cpu.install()
