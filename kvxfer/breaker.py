"""Placeholder: when a tier that keeps failing is turned off."""
