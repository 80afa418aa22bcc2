"""What tests of a training need: faults to inject. Production code knows nothing of it.

Loads no TensorFlow by itself.
"""
