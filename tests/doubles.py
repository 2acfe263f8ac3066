"""Doubles of a GPU machine's libraries: a libcuda.so.1 made here, and modules of a few lines."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

LIBCUDA = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is(const char *what) { const char *mode = getenv("FAKE_CUDA"); return mode && !strcmp(mode, what); }
int cuInit(unsigned flags) {
  if (is("hangs")) for (;;) sleep(1000);
  if (is("crashes")) abort();
  return is("no device") ? 100 : is("unheard of") ? 4321 : 0;
}
int cuGetErrorName(int error, const char **name) {
  *name = "CUDA_ERROR_NO_DEVICE";
  return error == 100 ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = is("empty") ? 0 : 2; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "Fake H200", bytes); return device > 1; }

/* Memory of device 0 is malloc's. Copies want its context in the calling thread. */
typedef unsigned long long address;
static struct { address base; size_t bytes; } made[64];
static __thread void *current;
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = made + device; return device != 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
static int find(address at) {
  for (int i = 0; i < 64; ++i) if (made[i].base && at >= made[i].base && at < made[i].base + made[i].bytes) return i;
  return -1;
}
int cuPointerGetAttribute(void *out, int what, address at) {
  *(int *)out = 0;
  return what == 9 && find(at) >= 0 ? 0 : 1;
}
int cuMemGetAddressRange_v2(address *base, size_t *bytes, address at) {
  const int i = find(at);
  if (i < 0) return 1;
  *base = made[i].base, *bytes = made[i].bytes;
  return 0;
}
int cuMemAlloc_v2(address *out, size_t bytes) {
  if (!current) return 201;
  if (is("full")) return 2;
  for (int i = 0; i < 64; ++i) if (!made[i].base) {
    made[i].base = *out = (address)aligned_alloc(4096, bytes), made[i].bytes = bytes;
    return 0;
  }
  return 2;
}
int cuMemFree_v2(address at) {
  const int i = find(at);
  if (!current || i < 0) return 1;
  free((void *)made[i].base);
  made[i].base = 0;
  return 0;
}
int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) {
  if (!current || find(to) < 0) return 201;
  memcpy((void *)to, from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) {
  if (!current || find(from) < 0) return 201;
  memcpy(to, (void *)from, bytes);
  return 0;
}
"""


class Doubles:
    """Puts doubles in the way of this process's children."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    def cuda(self, mode: str) -> None:
        """A libcuda.so.1 that works, hangs, crashes, ...: see LIBCUDA."""
        (self.folder / "cuda.c").write_text(LIBCUDA)
        library = self.folder / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, self.folder / "cuda.c"], check=True, timeout=60)
        self._monkeypatch.setenv("LD_LIBRARY_PATH", str(self.folder))
        self._monkeypatch.setenv("FAKE_CUDA", mode)

    def module(self, name: str, body: str) -> Path:
        """A module; the file that it leaves when it is imported."""
        modules = self.folder / "modules"
        package = modules / name
        package.mkdir(parents=True)
        trace = self.folder / f"{name} was imported"
        head = f"import os\nwith open({str(trace)!r}, 'w') as file: file.write(str(os.getpid()))\n"
        (package / "__init__.py").write_text(head + textwrap.dedent(body))
        self._monkeypatch.syspath_prepend(str(modules))
        paths = [str(modules), os.environ.get("PYTHONPATH", "")]
        self._monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        return trace

    def kvikio(self, compat_mode: str) -> Path:
        """A kvikio whose `defaults.get("compat_mode")` answers that."""
        trace = self.module("kvikio", "")
        (self.folder / "modules" / "kvikio" / "defaults.py").write_text(
            "import enum\n"
            "class CompatMode(enum.Enum):\n    OFF = 0\n    ON = 1\n    AUTO = 2\n"
            f"def get(name): return {{'compat_mode': CompatMode.{compat_mode}}}[name]\n"
        )
        return trace
