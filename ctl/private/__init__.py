"""The private modules of TensorFlow and tf_keras that ctl uses. BUILD.md lists all private names."""
