"""Data-parallel training on Horovod, with the same verbs for every framework.

Importing this package loads no framework; import an adapter (``hvdkit.torch``) for that.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
