"""The Keras adapter by the name that Horovod has for it; see ``hvdkit.keras``.

The one module of this adapter that knows the other; tapes take the reduction from here. Where
``tf.keras`` is Keras 2, Horovod's names are those of ``hvdkit.tensorflow.legacy_keras``.
"""

import sys as _sys

import keras as _keras

from hvdkit.errors import HvdkitError

if _keras.backend.backend() != "tensorflow":
    raise HvdkitError(
        f"hvdkit.tensorflow needs Keras on TensorFlow, and it is set to "
        f"{_keras.backend.backend()}: set KERAS_BACKEND=tensorflow, or import hvdkit.keras"
    )

from hvdkit import keras as _keras_3
from hvdkit.keras import *  # noqa: F403
from hvdkit.keras import __all__ as __all__
from hvdkit.keras.agreement import demand_equal_entries as demand_equal_entries
from hvdkit.keras.backend import allreduce_tensors as allreduce_tensors
from hvdkit.keras.backend import scale as scale
from hvdkit.keras.elastic import run as run_elastic  # noqa: F401
from hvdkit.keras.elastic_parts import ElasticParts as ElasticParts
from hvdkit.keras.elastic_parts import raise_losses as raise_losses
from hvdkit.keras.elastic_shard import ElasticShard as ElasticShard
from hvdkit.keras.reduction import ReductionOptions as ReductionOptions
from hvdkit.keras.reduction import reduce_gradients as reduce_gradients
from hvdkit.tensorflow import legacy_keras as _legacy

distribute_keras_3 = _keras_3.DistributedOptimizer

if _legacy.is_tf_keras():
    _legacy.mend_callbacks()
    globals().update(_legacy.replace_names())

# For ``import hvdkit.tensorflow.keras.callbacks``, as Horovod has it.
_sys.modules[f"{__name__}.callbacks"] = globals()["callbacks"]
_sys.modules[f"{__name__}.elastic"] = globals()["elastic"]
