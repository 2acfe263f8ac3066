"""kvxfer beside its peers: the converter and the engine, timed on checked bytes. Run as `python -m bench`."""
