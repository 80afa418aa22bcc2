"""Changes to an update: EMA, parameter groups, frozen layers, sharded slots, compression."""
