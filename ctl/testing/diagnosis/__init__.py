"""Finds the likely cause of a difference between splits.

`differences` compares the splits, and finds mistakes that no split reveals. `rules` tries the known
mistakes in order, with `update_rules`; `evidence` is their data, and `causes` has the texts.
"""
