"""The loops that a comparison can run: `loop`, and `trainer_subject` for ctl trainers.

`base` is the interface of all of them.
"""
