"""Finds the likely cause of a difference between splits.

`rules` tries the known mistakes in order, including `row_rules` and `metric_rules`; `evidence` is their
data. `probes` runs a trainer to measure single rows, `scaling` recognizes mistakes by factors,
`numerics` checks for mistakes that no split reveals, and `causes` has the texts.
"""
