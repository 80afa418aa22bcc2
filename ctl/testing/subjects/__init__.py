"""What a comparison can run: a loop in `loop` and `adapters`, or a ctl trainer in `trainer`.

`base` is the interface that both implement.
"""
