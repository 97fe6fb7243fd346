"""torchao's base class for tensor subclasses, imported quietly.

At import torchao warns about CUDA extensions that do not load on this machine and that nothing here uses. A user can do
nothing about it, so warnings are held back for as long as the import takes.
"""

import logging

_level = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    from torchao.utils import TorchAOBaseTensor
finally:
    logging.disable(_level)

__all__ = ["TorchAOBaseTensor"]
