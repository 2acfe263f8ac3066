"""Tools to test kvxfer, and programs that use it, against failing storage and failing devices.

`FaultyIO` acts on the table of system calls in libkvx, `FakeDevice` in the place of an accelerator. Nothing in the
product knows of either.
"""

from kvxfer.testing.fake_device import FakeDevice
from kvxfer.testing.faulty_io import FaultyIO, Rule
from kvxfer.testing.tools import ManualClock, assert_bytes_equal

__all__ = ["FakeDevice", "FaultyIO", "ManualClock", "Rule", "assert_bytes_equal"]
