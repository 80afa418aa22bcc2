"""Finds the likely cause of a difference between splits.

`rules` tries the known mistakes in order, with those of `row_rules` and `metric_rules`; `evidence` is
what they know. `probes` runs a trainer to measure single rows, `scaling` recognizes mistakes by factors,
`numerics` checks what no split reveals, `causes` has the texts.
"""
