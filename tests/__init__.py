"""Tests; the folders mirror kvxfer/."""
