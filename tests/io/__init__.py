"""Tests of kvxfer.io."""
