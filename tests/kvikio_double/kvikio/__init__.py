"""A double of kvikio 26.10, as far as kvxfer uses it, over real files: "device memory" is this process's.

Put this folder's parent in front of sys.path (PYTHONPATH for children). What it does wrong is in `double.faults`, which
KVIKIO_DOUBLE, a JSON object, fills at import. A test compares its signatures with the installed kvikio's.
"""

from __future__ import annotations

from kvikio import double

double.imported()

from kvikio.buffer import bounce_buffer_free, memory_deregister, memory_register  # noqa: E402
from kvikio.cufile import CuFile  # noqa: E402
from kvikio.defaults import CompatMode  # noqa: E402

__version__ = double.faults.get("version", "26.10.00")
__all__ = ["CompatMode", "CuFile", "__version__", "bounce_buffer_free", "memory_deregister", "memory_register"]
