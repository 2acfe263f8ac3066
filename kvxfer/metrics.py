"""Placeholder: counters of the core."""
