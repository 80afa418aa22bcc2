"""Finds the likely cause of a difference between splits.

`checks` finds the differences: between the splits, and those that no split reveals. `rules` tries the
known mistakes in order, with `row_rules`, `update_rules` and `metric_rules`; `evidence` is their data,
`calibration` measures rounding errors and random numbers, and `causes` has the texts.
"""
