"""Test only. In place of torchvision, which SGLang imports and text models do not use."""

import sys

from absent import AbsentModules, attribute

__version__ = "0.0.0+stub"
__path__: list[str] = []
__getattr__ = attribute
sys.meta_path.append(AbsentModules(__name__))
