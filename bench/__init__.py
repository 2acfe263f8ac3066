"""kvxfer beside its peers, timed on checked bytes; and what must not grow. Run as `python -m bench`."""
