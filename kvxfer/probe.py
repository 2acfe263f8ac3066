"""Placeholder: what this machine has."""
