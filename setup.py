"""Builds csrc/*.cpp into kvxfer/libkvx.so, one C ABI library without Python headers (see pyproject.toml for the rest).

Where nvcc is found, csrc/cuda/*.cu becomes kvxfer/libkvx_cuda.so too. Everything but some copies to and from GPUs works
without it, so nothing that is wrong with nvcc fails the build: the reason is printed.

Environment:
    CXX               the compiler (may carry arguments); else the first of g++, c++, clang++ that is installed
    CXXFLAGS          appended to the compiler's arguments
    NVCC              the CUDA compiler (may carry arguments); else nvcc on PATH, or in CUDA_HOME or /usr/local/cuda
    NVCCFLAGS         appended to its arguments
    KVXFER_CUDA       0: libkvx_cuda is not built (nor loaded)
    KVXFER_SANITIZE   1 or address: AddressSanitizer and UBSan; thread: ThreadSanitizer; empty or 0: none
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

LIBRARY = "kvxfer.libkvx"
CUDA_LIBRARY = "kvxfer.libkvx_cuda"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
# No code for GPUs is in it, so no architecture is named. The runtime's own names stay inside: torch brings another.
CUDA_FLAGS = [
    "-shared", "-cudart", "static", "-std=c++17", "-O2",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra", "-Xlinker", "--exclude-libs=ALL",
]  # fmt: skip
CUDA_TIMEOUT_S = 600
SANITIZERS = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer", "-O1", "-g"],
}


def find_compiler() -> list[str]:
    """The compiler's command line.

    Raises:
        PlatformError: there is none; says what was looked for and how to get one.
    """
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]):
            return wanted
        raise PlatformError(f"CXX={os.environ['CXX']!r} is not an installed compiler; set CXX to one, or unset it")
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise PlatformError(
        f"kvxfer needs a C++17 compiler and found none: CXX is not set, and {', '.join(COMPILERS)} are not on PATH. "
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or set CXX."
    )


def sanitizer() -> str:
    """Which sanitizers KVXFER_SANITIZE asks for: a key of SANITIZERS."""
    value = os.environ.get("KVXFER_SANITIZE", "")
    name = {"1": "address", "0": ""}.get(value, value)
    if name not in SANITIZERS:
        raise PlatformError(f"KVXFER_SANITIZE={value!r} is unknown; allowed are 1 (or address), thread, 0")
    return name


def find_nvcc() -> tuple[list[str], str]:
    """The CUDA compiler's command line; or nothing, and why libkvx_cuda is not built."""
    if (wanted := os.environ.get("KVXFER_CUDA", "")) not in ("", "0", "1"):
        raise PlatformError(f"KVXFER_CUDA={wanted!r} is unknown; allowed are 1, 0")
    if wanted == "0":
        return [], "KVXFER_CUDA=0"
    if sanitizer():
        return [], "sanitizers are for libkvx"
    try:
        for name in ("NVCC", "NVCCFLAGS"):
            shlex.split(os.environ.get(name, ""))
    except ValueError as exc:
        return [], f"{name}={os.environ[name]!r}: {exc}"
    if command := shlex.split(os.environ.get("NVCC", "")):
        return (command, "") if shutil.which(command[0]) else ([], f"NVCC={os.environ['NVCC']!r} is not installed")
    homes = [os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for name in ["nvcc", *(os.path.join(home, "bin", "nvcc") for home in homes if home)]:
        if found := shutil.which(name):
            return [found], ""
    return [], "no nvcc was found"


class BuildLibrary(build_ext):
    """Compiles what is out of date, side by side, and links."""

    def build_extensions(self) -> None:
        """Builds libkvx, which must succeed, and libkvx_cuda, which may be left out."""
        for ext in list(self.extensions):
            if ext.name != CUDA_LIBRARY:
                self.build_extension(ext)
            elif why := self.build_cuda(ext):
                print(f"libkvx_cuda is not built: {why}", flush=True)
                self.extensions.remove(ext)  # or it would be looked for where it is installed
                if not self.inplace:  # a wheel takes all that is there: also what an earlier build left
                    Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)

    def build_cuda(self, ext: Extension) -> str:
        """Builds libkvx_cuda unless it is up to date; else why it is not there."""
        compiler, why = find_nvcc()
        if not compiler:
            return why
        target = Path(self.get_ext_fullpath(ext.name))
        folder = Path("build") / f"csrc-cuda-{self.plat_name}"  # as the objects of libkvx, for every kind of build
        built, stamp = folder / target.name, folder / "command"
        command = [*compiler, *CUDA_FLAGS, *shlex.split(os.environ.get("NVCCFLAGS", "")), *ext.sources]
        newest = max(Path(name).stat().st_mtime for name in [*ext.sources, *ext.depends])
        known = stamp.exists() and stamp.read_text() == shlex.join(command)
        if self.force or not known or not built.exists() or built.stat().st_mtime < newest:
            folder.mkdir(parents=True, exist_ok=True)
            built.unlink(missing_ok=True)
            try:
                done = subprocess.run(
                    [*command, "-o", str(built)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True, errors="replace", timeout=CUDA_TIMEOUT_S,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as exc:
                return f"{type(exc).__name__}: {exc}"
            if done.returncode or not built.exists():
                return f"exit status {done.returncode} from: {shlex.join(command)}\n{done.stdout}".rstrip()
            stamp.write_text(shlex.join(command))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: a process may have the old one mapped.
        shutil.copyfile(built, fresh := target.with_name(f".{target.name}.{os.getpid()}"))
        os.replace(fresh, target)
        return ""

    def get_ext_filename(self, fullname: str) -> str:
        """The library has no Python ABI in its name: it uses none."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Builds `ext` with the compiler found, into the path setuptools expects."""
        compiler, kind = find_compiler(), sanitizer()
        flags = FLAGS + SANITIZERS[kind] + shlex.split(os.environ.get("CXXFLAGS", ""))
        target = Path(self.get_ext_fullpath(ext.name))
        # Not build_temp: that is another folder for each Python and for editable builds; the objects are the same.
        objects_dir = Path("build") / f"csrc-{self.plat_name}-{kind or 'plain'}"
        objects_dir.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)

        # What decides over a rebuild besides times: the command itself.
        command = shlex.join([*compiler, *flags])
        stamp = objects_dir / "command"
        if not stamp.exists() or stamp.read_text() != command:
            stamp.write_text(command)
        common = max(Path(name).stat().st_mtime for name in [str(stamp), *ext.depends])
        objects = {source: objects_dir / f"{Path(source).stem}.o" for source in ext.sources}

        def stale(source: str, path: Path) -> bool:
            return self.force or not path.exists() or path.stat().st_mtime < max(common, Path(source).stat().st_mtime)

        steps = [
            [*compiler, *flags, "-c", source, "-o", str(path)]
            for source, path in objects.items()
            if stale(source, path)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(self.call, steps))
        # Linked every time: the target may come from another set of objects (a sanitizer's).
        self.call([*compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(target)])

    def call(self, command: list[str]) -> None:
        """Runs one step; a failure shows the command and what the compiler said."""
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.stdout:
            print(done.stdout, end="", flush=True)
        if done.returncode:
            raise CompileError(f"exit status {done.returncode} from: {shlex.join(command)}")


class AnyPython(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>."""
        return "py3", "none", super().get_tag()[2]


def relative(pattern: str) -> list[str]:
    """Sorted files of csrc/, relative to this file (setuptools wants them so)."""
    return sorted(str(path) for path in Path("csrc").glob(pattern))


os.chdir(Path(__file__).resolve().parent)
extensions = [Extension(LIBRARY, sources=relative("*.cpp"), depends=[*relative("*.h"), "setup.py"])]
if cuda_sources := relative("cuda/*.cu"):
    extensions.append(Extension(CUDA_LIBRARY, sources=cuda_sources, depends=[*relative("cuda/*.h"), "setup.py"]))
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
