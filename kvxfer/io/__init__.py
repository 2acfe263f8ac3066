"""Files and how they are opened: `posix` for the host's memory, `gds` (kvikio) for a device's; `ladder` chooses."""
