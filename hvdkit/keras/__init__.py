"""The Keras 3 adapter, on TensorFlow and on PyTorch: all of ``horovod.keras``, and averaging.

A script that says ``import horovod.tensorflow.keras as hvd`` (or ``horovod.keras``) says
``import hvdkit.keras as hvd`` instead.
"""

from hvdkit.events import EventLog
from hvdkit.keras import callbacks, elastic
from hvdkit.keras.backend import hvd as _hvd
from hvdkit.keras.buffers import average_buffers
from hvdkit.keras.callbacks import rank_zero
from hvdkit.keras.checkpoint import CheckpointStore, restore_or_broadcast
from hvdkit.keras.data import shard
from hvdkit.keras.device import pick_device, set_threads
from hvdkit.keras.health import HealthMonitor
from hvdkit.keras.metrics import average_metrics
from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdkit.keras.random_state import gather_random_state
from hvdkit.keras.replica_check import ReplicaCheck
from hvdkit.keras.replicas import check_replicas
from hvdkit.keras.rollback import roll_back
from hvdkit.keras.saving import load_model
from hvdkit.keras.schedule import scale_learning_rate
from hvdkit.keras.startup import init
from hvdkit.keras.state import broadcast_initial_state, broadcast_variables
from hvdkit.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)

Adasum = _hvd.Adasum
Average = _hvd.Average
Compression = _hvd.Compression
ProcessSet = _hvd.ProcessSet
Sum = _hvd.Sum
add_process_set = _hvd.add_process_set
broadcast_object = _hvd.broadcast_object
ccl_built = _hvd.ccl_built
cross_rank = _hvd.cross_rank
cross_size = _hvd.cross_size
cuda_built = _hvd.cuda_built
ddl_built = _hvd.ddl_built
global_process_set = _hvd.global_process_set
gloo_built = _hvd.gloo_built
gloo_enabled = _hvd.gloo_enabled
is_initialized = _hvd.is_initialized
local_rank = _hvd.local_rank
local_size = _hvd.local_size
mpi_built = _hvd.mpi_built
mpi_enabled = _hvd.mpi_enabled
mpi_threads_supported = _hvd.mpi_threads_supported
nccl_built = _hvd.nccl_built
rank = _hvd.rank
remove_process_set = _hvd.remove_process_set
rocm_built = _hvd.rocm_built
shutdown = _hvd.shutdown
size = _hvd.size
start_timeline = _hvd.start_timeline
stop_timeline = _hvd.stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "CheckpointStore",
    "Compression",
    "DistributedOptimizer",
    "EventLog",
    "HealthMonitor",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "ReplicaCheck",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "average_buffers",
    "average_metrics",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_initial_state",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_replicas",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gather_random_state",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "pick_device",
    "rank",
    "rank_zero",
    "reducescatter",
    "remove_process_set",
    "restore_or_broadcast",
    "rocm_built",
    "roll_back",
    "scale_learning_rate",
    "set_threads",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
