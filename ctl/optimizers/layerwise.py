"""LAMB and LARS: optimizers that scale the update of each variable by the norm of the variable.

tf_keras has neither. Model Garden's are legacy optimizers, which cannot apply an update that is
already reduced. These compute the same numbers.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras


class _Layerwise(tf_keras.optimizers.Optimizer):
    """A base class with weight decay inside of the update, and the trust ratio of a variable."""

    _slot_names: tuple[str, ...]  # set by each subclass
    _hyperparameters: tuple[str, ...]  # arguments of its constructor, and attributes

    def __init__(self, learning_rate: Any, weight_decay: float | None, **kwargs: Any):
        # Not the base class' decay, which is applied outside of the update, not scaled by the ratio.
        super().__init__(weight_decay=None, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.layerwise_weight_decay = weight_decay or 0.0

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the slot variables."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._built = True
        self._slots = {
            name: [
                self.add_variable_from_reference(model_variable=v, variable_name=name)
                for v in var_list
            ]
            for name in self._slot_names
        }

    def _slot(self, name: str, variable: tf.Variable) -> tf.Variable:
        return self._slots[name][self._index_dict[self._var_key(variable)]]

    def _decay(self, variable: tf.Variable) -> Any:
        """Returns the term of the weight decay; 0 for an excluded variable."""
        if not self.layerwise_weight_decay or not self._use_weight_decay(variable):
            return 0
        return self.layerwise_weight_decay * variable

    def _trust_ratio(self, variable: tf.Variable, update: tf.Tensor, factor: float = 1.0) -> Any:
        """Returns factor * |variable| / |update|; 1 if a norm is 0 or the variable is excluded."""
        # As in Model Garden: what is excluded from the decay (biases, normalization) is not scaled.
        if not self._use_weight_decay(variable):
            return 1
        weight_norm, update_norm = tf.norm(variable), tf.norm(update)
        ratio = factor * tf.math.divide_no_nan(weight_norm, update_norm)
        return tf.where(ratio > 0, ratio, tf.ones_like(ratio))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        # Without those of the base class that the constructor does not take, such as clipnorm.
        return {
            "name": self.name,
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "weight_decay": self.layerwise_weight_decay,
            "jit_compile": self.jit_compile,
            **{name: getattr(self, name) for name in self._hyperparameters},
        }


class LAMB(_Layerwise):
    """Layer-wise adaptive moments (You et al. 2020, "Large batch optimization for deep learning").

    m, v and their bias correction are computed as in Adam. The update m / (sqrt(v) + epsilon) +
    weight_decay * w of each variable is scaled to the norm of the variable. The arguments are defined
    as in the paper.
    """

    _slot_names = ("m", "v")
    _hyperparameters = ("beta_1", "beta_2", "epsilon")

    def __init__(
        self, learning_rate: Any = 0.001, beta_1: float = 0.9, beta_2: float = 0.999,
        epsilon: float = 1e-6, weight_decay: float | None = None, jit_compile: bool = True,
        name: str = "LAMB",
    ):  # fmt: skip
        super().__init__(learning_rate, weight_decay, jit_compile=jit_compile, name=name)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Updates one variable; a sparse gradient counts as the dense one."""
        gradient = tf.convert_to_tensor(gradient)
        step = tf.cast(self.iterations + 1, variable.dtype)
        m, v = self._slot("m", variable), self._slot("v", variable)
        m.assign_add((gradient - m) * (1 - self.beta_1))
        v.assign_add((tf.square(gradient) - v) * (1 - self.beta_2))
        # Corrected as in the paper; a Python number to the power of a tensor has the tensor's dtype.
        m_hat = m / (1 - tf.pow(tf.cast(self.beta_1, step.dtype), step))
        v_hat = v / (1 - tf.pow(tf.cast(self.beta_2, step.dtype), step))
        update = m_hat / (tf.sqrt(v_hat) + self.epsilon) + self._decay(variable)
        rate = tf.cast(self.learning_rate, variable.dtype)
        variable.assign_sub(rate * self._trust_ratio(variable, update) * update)


class LARS(_Layerwise):
    """Layer-wise adaptive rate scaling (You et al. 2017, "Large batch training of ... networks").

    SGD with momentum, whose rate is multiplied by trust_coefficient * |w| / |gradient + decay * w| for
    each variable. The arguments are defined as in the paper.
    """

    _slot_names = ("m",)
    _hyperparameters = ("momentum", "nesterov", "trust_coefficient")

    def __init__(
        self, learning_rate: Any = 0.01, momentum: float = 0.9, nesterov: bool = False,
        trust_coefficient: float = 0.001, weight_decay: float | None = None,
        jit_compile: bool = True, name: str = "LARS",
    ):  # fmt: skip
        super().__init__(learning_rate, weight_decay, jit_compile=jit_compile, name=name)
        self.momentum, self.nesterov = momentum, nesterov
        self.trust_coefficient = trust_coefficient

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Updates one variable; a sparse gradient counts as the dense one."""
        gradient = tf.convert_to_tensor(gradient) + self._decay(variable)
        ratio = self._trust_ratio(variable, gradient, self.trust_coefficient)
        scaled = tf.cast(self.learning_rate, variable.dtype) * ratio * gradient
        m = self._slot("m", variable)
        m.assign(self.momentum * m + scaled)
        variable.assign_sub(self.momentum * m + scaled if self.nesterov else m)
