"""How a step is compiled and run, and the time and memory that it takes."""
