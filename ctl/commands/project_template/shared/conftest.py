"""Splits the CPU, so that a test may train on several replicas. It must run before TensorFlow does."""

from ctl import testing

testing.split_cpu(4)
