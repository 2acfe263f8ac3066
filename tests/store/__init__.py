"""Tests of kvxfer.store."""
