"""Every error kvxfer raises on purpose.

KvxferError
├── ConfigError (ValueError)   a configuration value that cannot work; names the value and what is allowed
├── LayoutError (ValueError)   pages, shards or mappings that cannot be certified; says why
├── FormatError                a root, slab or namespace written by something else, or by a newer kvxfer
├── IOFault (OSError)          a storage call failed; has errno, and the message says what survives
├── StoreError                 the store cannot do what was asked (closed, in use by another process, ...)
├── EngineClosed               submit after shutdown
├── ForkError                  used in a child of the process that opened it
├── NativeError                libkvx is missing or of another version
└── DeviceError                an accelerator was lost, or refused a call
    └── DeviceMemoryError (MemoryError)   it has not as much memory left
"""


class KvxferError(Exception):
    """Base of all errors raised by kvxfer."""


class ConfigError(KvxferError, ValueError):
    """A configuration value that cannot work."""


class LayoutError(KvxferError, ValueError):
    """Pages, shards or mappings that cannot be certified."""


class FormatError(KvxferError):
    """Bytes on disk that this version must not touch."""


class IOFault(KvxferError, OSError):
    """A storage call failed. `errno` and `filename` are set as in OSError."""


class StoreError(KvxferError):
    """The store cannot do what was asked of it."""


class EngineClosed(KvxferError):
    """The engine no longer takes jobs."""


class ForkError(KvxferError):
    """The object belongs to the parent process: its threads and locks do not exist here."""


class NativeError(KvxferError):
    """The native library is missing, or was built for another version."""


class DeviceError(KvxferError):
    """An accelerator was lost, or refused a call."""


class DeviceMemoryError(DeviceError, MemoryError):
    """An accelerator has not as much memory left."""
