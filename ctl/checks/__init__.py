"""Checks of users' code on the traced graphs."""
