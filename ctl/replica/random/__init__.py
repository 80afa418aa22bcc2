"""Random draws that depend on the row of the global batch, and not on its replica."""
