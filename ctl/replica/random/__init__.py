"""Random numbers that are functions of the seed, the step and the row, however a batch is split."""
