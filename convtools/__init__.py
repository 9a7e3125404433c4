"""Exact conversion of model weights between Hugging Face and Megatron checkpoints.

>>> import convtools
>>> report = convtools.convert("Nemotron-H/", "out/", convtools.Options(to="torch_dist"))  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convtools.conversion.api import convert, open_source
    from convtools.conversion.options import Options
    from convtools.conversion.report import Report
    from convtools.equality.compare import compare
    from convtools.equality.fingerprint_store import fingerprint
    from convtools.equality.live import Shards
    from convtools.equality.options import CompareOptions
    from convtools.equality.verdict import Comparison
    from convtools.errors import ConvtoolsError
    from convtools.inspection import Inspection, inspect
    from convtools.refit.hf_names import hf_tensors
    from convtools.refit.load import load_into
    from convtools.refit.sinks.url import connect
    from convtools.refit.sync import WeightSync
    from convtools.slicing.build import slice_checkpoint
    from convtools.slicing.options import SliceOptions
    from convtools.slicing.report import SliceReport
    from convtools.slicing.verification import verify_slice

_HOME = {
    "CompareOptions": "convtools.equality.options",
    "Comparison": "convtools.equality.verdict",
    "ConvtoolsError": "convtools.errors",
    "Inspection": "convtools.inspection",
    "Options": "convtools.conversion.options",
    "Report": "convtools.conversion.report",
    "Shards": "convtools.equality.live",
    "SliceOptions": "convtools.slicing.options",
    "SliceReport": "convtools.slicing.report",
    "WeightSync": "convtools.refit.sync",
    "compare": "convtools.equality.compare",
    "connect": "convtools.refit.sinks.url",
    "convert": "convtools.conversion.api",
    "fingerprint": "convtools.equality.fingerprint_store",
    "hf_tensors": "convtools.refit.hf_names",
    "inspect": "convtools.inspection",
    "load_into": "convtools.refit.load",
    "open_source": "convtools.conversion.api",
    "slice_checkpoint": "convtools.slicing.build",
    "verify_slice": "convtools.slicing.verification",
}

__all__ = [
    "CompareOptions", "Comparison", "ConvtoolsError", "Inspection", "Options", "Report", "Shards",
    "SliceOptions", "SliceReport", "WeightSync", "compare", "connect", "convert", "fingerprint",
    "hf_tensors", "inspect", "load_into", "open_source", "slice_checkpoint", "verify_slice",
]  # fmt: skip
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Submodules are imported when first asked for: `import convtools` itself costs nothing.
    if name not in _HOME:
        raise AttributeError(f"module 'convtools' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
