"""ctl next to other ways to train the same models: TensorFlow, tf_keras, Keras 3, JAX and PyTorch."""
