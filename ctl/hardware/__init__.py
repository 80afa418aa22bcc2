"""The devices and processes that a run uses, and the `tf.distribute.Strategy` built on them."""
