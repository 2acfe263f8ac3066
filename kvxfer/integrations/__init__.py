"""Adapters for servers. Each imports its server, and nothing else in kvxfer does."""
