"""Tests training loops that are not ctl's: plain TensorFlow, Orbit, Keras 2 and Keras 3.

`equivalence` has the assertion. `protocol` is the interface of a loop, `adapters` wraps trainers and
compiled models, `runner` runs a loop on a split, `trial` compares the splits, `calibration` measures
rounding errors and randomness on one replica, `diagnosis` and `rows` find the cause of a difference,
`randomness` finds equal or unwanted random numbers, and `causes` has the texts.
"""
