"""The PyTorch adapter: all of ``horovod.torch``, mended and extended.

A script that says ``import horovod.torch as hvd`` says ``import hvdkit.torch as hvd`` instead.
"""

from horovod.torch import *  # noqa: F403
from horovod.torch import elastic, mpi_ops

from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.wire import Compression
