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

from hvdkit.tensorflow.keras import broadcast_initial_state, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

run = _horovod.run


class TensorFlowKerasState(_horovod.TensorFlowKerasState):  # type: ignore[misc, unused-ignore]
    """A Keras model and its optimizer, and further attributes, that survive a change of ranks.

    Args:
        model: Built. One of ``tf_keras`` takes Horovod's own path.
        optimizer: By default the one that the model was compiled with. It is built, so that
            there is a state to go back to.
        backend: For TensorFlow 1.
        kwargs: Further attributes, synchronized too.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        optimizer = optimizer or model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer, backend, **kwargs)
        if self._is_keras_3():
            self._bcast_model = lambda: broadcast_initial_state(self.model, self.optimizer)

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


class TensorFlowState(_horovod.TensorFlowState):  # type: ignore[misc, unused-ignore]
    """Variables, and further attributes, that survive a change of ranks.

    Args:
        variables: Of TensorFlow or Keras; None for all of a graph of TensorFlow 1.
        session: For TensorFlow 1.
        kwargs: Further attributes, synchronized too.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self._eager = tf.executing_eagerly()
        if not self._eager:
            super().__init__(variables, session, **kwargs)
            return
        self.variables = list(variables or ())
        self.session = None
        self._eval_fn = lambda variable: variable.numpy().copy()
        self._assign_fn = self._assign_var
        self._save_model()
        ObjectState.__init__(self, bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def sync(self) -> None:
        """Give every rank the root's values. Collective: every rank must call."""
        if self._eager:
            broadcast_variables(self.variables, root_rank=0)
        super().sync()
