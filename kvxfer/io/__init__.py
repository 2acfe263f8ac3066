"""Files and how they are opened. `posix` is the only backend so far."""
