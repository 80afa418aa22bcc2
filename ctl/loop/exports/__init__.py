"""Writes trained models in formats that need neither ctl nor the trainer's code."""
