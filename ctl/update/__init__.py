"""The update of a global batch, in the order of docs/step.md."""
