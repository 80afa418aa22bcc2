"""Models of Keras 3: the one place that knows how they differ from those of tf_keras.

`ctl.keras.models` opens `package` for an object of Keras 3. `adapter` shows a model as a
tf_keras model with the same tf.Variables, which the rest of ctl trains like any other. Its random layers
draw by ctl's streams (`random`), its batch normalizations use ctl's statistics (`batch_norm`), and its
optimizers and metrics become those of tf_keras (`conversion`). No module imports keras, except those
that `adapt` imports for a Keras 3 model.
"""
