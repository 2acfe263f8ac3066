"""kvxfer beside its peers: the converter and the engine, timed on checked bytes, and what must not grow. Run as `python -m bench`."""
