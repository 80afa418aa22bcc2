"""What a step needs in memory, and ways to need less."""
