"""Horovod's elastic training, for Keras 3 models and for variables in eager mode.

Horovod asks Keras's optimizers for what Keras 3 no longer has, and synchronizes variables when
their state is made, where who joins stands alone, and not when it is asked to.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.tensorflow import broadcast_object, rank
from horovod.tensorflow import elastic as _horovod

from hvdkit.tensorflow.elastic_shard import ElasticShard
from hvdkit.tensorflow.keras import (
    ElasticParts,
    broadcast_initial_state,
    broadcast_variables,
    raise_losses,
    run_elastic,
)

__all__ = ["ElasticShard", "TensorFlowKerasState", "TensorFlowState", "run"]

run = run_elastic


class TensorFlowKerasState(ElasticParts, _horovod.TensorFlowKerasState):
    """A Keras model and its optimizer, and further attributes, that survive a change of ranks.

    Args:
        model: Built. One of ``tf_keras`` takes Horovod's own path.
        optimizer: By default the one that the model was compiled with. It is built, so that
            there is a state to go back to.
        backend: For TensorFlow 1.
        learning_rate_rule: As for ``hvdkit.keras``'s ``KerasState``.
        keep_global_batch: Likewise. A ``tf.function`` of your own keeps the passes that it was
            traced with: trace it anew in the training function.
        kwargs: Further attributes, synchronized too; an ``ElasticShard`` by its position.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        *,
        learning_rate_rule: str = "none",
        keep_global_batch: bool = False,
        **kwargs: Any,
    ) -> None:
        optimizer = optimizer or model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)
        values = self._adopt(optimizer, learning_rate_rule, keep_global_batch, kwargs)
        super().__init__(model, optimizer, backend, **values)
        if self._is_keras_3():
            self._bcast_model = lambda: broadcast_initial_state(self.model, self.optimizer)

    @raise_losses
    def sync(self) -> None:
        """Take over rank 0's values, and count them as kept. Collective: every rank must call."""
        super().sync()

    def _is_keras_3(self) -> bool:
        return isinstance(self.optimizer, keras.optimizers.Optimizer)

    def _save_model(self) -> None:
        if not self._is_keras_3():
            super()._save_model()
            return
        self._saved_model_state = [v.numpy().copy() for v in self.model.variables]
        self._saved_optimizer_state = [v.numpy().copy() for v in self.optimizer.variables]

    def _load_model(self) -> None:
        if not self._is_keras_3():
            super()._load_model()
            return
        for variables, values in (
            (self.model.variables, self._saved_model_state),
            (self.optimizer.variables, self._saved_optimizer_state),
        ):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)


class TensorFlowState(ElasticParts, _horovod.TensorFlowState):
    """Variables, and further attributes, that survive a change of ranks.

    Args:
        variables: Of TensorFlow or Keras; None for all of a graph of TensorFlow 1.
        session: For TensorFlow 1.
        kwargs: Further attributes, synchronized too; an ``ElasticShard`` by its position.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self._eager = tf.executing_eagerly()
        values = self._adopt(None, "none", False, kwargs)
        if not self._eager:
            super().__init__(variables, session, **values)
            return
        self.variables = list(variables or ())
        self.session = None
        self._eval_fn = lambda variable: variable.numpy().copy()
        self._assign_fn = self._assign_var
        self._save_model()
        ObjectState.__init__(self, bcast_object=broadcast_object, get_rank=rank, **values)

    @raise_losses
    def sync(self) -> None:
        """Give every rank the root's values. Collective: every rank must call."""
        if self._eager:
            broadcast_variables(self.variables, root_rank=0)
        super().sync()
