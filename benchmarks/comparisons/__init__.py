"""What other loops compute, next to the exact number: the cases behind docs/compared.md.

orbit_and_keras.py   python -m benchmarks.comparisons.orbit_and_keras
tutorials.py         python -m benchmarks.comparisons.tutorials
torch_loops.py       Lightning and Accelerate; requires PyTorch, which the project does not install
"""
