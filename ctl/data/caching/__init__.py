"""Keeps parsed examples in a folder or in memory."""
