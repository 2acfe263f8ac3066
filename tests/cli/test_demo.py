"""`kvxfer demo`: the numbers it promises, every option, and that a wrong byte is never passed over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.cli import BAD_INPUT, WRONG_BYTES, main
from kvxfer.convert import native
from kvxfer.engine import TransferEngine
from kvxfer.errors import ConfigError
from kvxfer.geometry import PRESETS
from tests.cli.commands import forked

BLOCK_BYTES = {name: geometry.block_bytes for name, geometry in PRESETS.items()}
PROMISED = (
    "model store_shards load_shards io_mode requested_blocks arrived_blocks prefix_blocks usable_tokens "
    "recompute_tokens kept_beyond_gap all_or_nothing_recompute_tokens bytes_checked bytes_wrong gather_GBps store_GBps "
    "load_GBps scatter_GBps"
).split()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run([sys.executable, "-m", "kvxfer.cli", *arguments], capture_output=True, text=True, timeout=100)


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `kvxfer demo --json` in this process: the exit code, and the object it prints."""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["demo", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_by_default_28_of_40_blocks_are_kept() -> None:
    done = forked("demo", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert not set(PROMISED) - report.keys()
    assert [report[name] for name in PROMISED[4:13]] == [40, 39, 28, 448, 192, 11, 640, 39 * 2 << 20, 0]
    assert (report["model"], report["store_shards"], report["load_shards"]) == ("llama-3.1-8b", 2, 4)
    assert (report["store_layout"], report["load_layout"]) == ("nhd", "hnd")
    assert (report["chunks_verified"], report["chunks_refused"]) == (40, 1)
    assert report["io_mode"].startswith("posix ")
    assert all(report[name] > 0 for name in PROMISED[13:])


def test_the_human_view_says_it_without_colour() -> None:
    done = forked("demo", "--blocks", "20", "--lose", "12,15")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert lines[5].split() == ["0", "■" * 10, "■■×□□×□□□□"]
    assert "■ 12 prefix" in done.stdout
    assert "× 2 lost" in done.stdout
    assert "□ 6 beyond the gap" in done.stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert ["kvxfer", "192", "128"] in cells
    assert ["all or nothing", "0", "320"] in cells
    assert "0 wrong" in lines[-1]


def test_the_human_view_needs_no_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run("demo", "--blocks", "3", "--lose", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "#xo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "blocks", "arrived", "prefix", "usable"),
    [
        pytest.param("--blocks 9 --lose none", 9, 9, 9, 128, id="a whole hit leaves a block to compute"),
        pytest.param("--blocks 9 --lose 3,0,3", 9, 7, 0, 0, id="several, the first among them"),
        pytest.param("--blocks 9 --lose 8", 9, 8, 8, 128, id="the last"),
        pytest.param("--blocks 1", 1, 0, 0, 0, id="the only one"),
        pytest.param("--blocks 10 --lose 5 --blocks-per-chunk 4", 10, 6, 4, 64, id="four blocks a chunk"),
        pytest.param("--blocks 10 --lose 9 --blocks-per-chunk 4", 10, 8, 8, 128, id="a partial last chunk"),
        pytest.param("--blocks 6 --lose none --blocks-per-chunk 256", 6, 6, 6, 80, id="one partial chunk"),
        pytest.param("--blocks 6 --store-tp 1 --load-tp 8", 6, 5, 4, 64, id="one rank to eight"),
        pytest.param("--blocks 6 --store-tp 16 --load-tp 2", 6, 5, 4, 64, id="more ranks than heads store"),
        pytest.param("--blocks 6 --store-tp 2 --load-tp 16", 6, 5, 4, 64, id="more ranks than heads load"),
    ],
)
def test_what_arrives(demo: Any, arguments: str, blocks: int, arrived: int, prefix: int, usable: int) -> None:
    code, report = demo(*arguments.split())
    assert code == 0
    assert report["requested_blocks"] == blocks
    assert (report["arrived_blocks"], report["prefix_blocks"], report["usable_tokens"]) == (arrived, prefix, usable)
    assert report["kept_beyond_gap"] == arrived - prefix
    assert report["usable_tokens"] + report["recompute_tokens"] == blocks * 16
    whole = arrived == blocks
    assert report["all_or_nothing_recompute_tokens"] == (report["recompute_tokens"] if whole else blocks * 16)
    replicas = max(1, report["load_shards"] // 8)
    assert report["bytes_checked"] == arrived * BLOCK_BYTES["llama-3.1-8b"] * replicas
    assert report["bytes_wrong"] == 0


@pytest.mark.parametrize("load", ["nhd", "hnd", "packed", "packed-nhd", "split", "split-hnd"])
@pytest.mark.parametrize("store", ["hnd", "split"])
def test_every_page_layout(demo: Any, store: str, load: str) -> None:
    code, report = demo("--blocks", "3", "--store-layout", store, "--load-layout", load)
    assert (code, report["arrived_blocks"], report["bytes_wrong"]) == (0, 2, 0)


def test_a_latent_is_held_by_every_rank(demo: Any) -> None:
    code, report = demo("--model", "deepseek-v3", "--blocks", "10", "--store-tp", "4", "--load-tp", "3")
    assert (code, report["arrived_blocks"], report["prefix_blocks"], report["bytes_wrong"]) == (0, 9, 7, 0)
    assert report["bytes_checked"] == 9 * 3 * BLOCK_BYTES["deepseek-v3"]


def test_a_kept_root_takes_another_run(demo: Any, tmp_root: Path) -> None:
    for _ in range(2):
        code, report = demo("--blocks", "5", "--root", str(tmp_root))
        assert (code, report["arrived_blocks"], report["bytes_wrong"]) == (0, 4, 0)
    assert (tmp_root / "kvxfer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--model gpt-2", ["--model", "'gpt-2'", "llama-3.1-8b", "deepseek-v3"]),
        ("--blocks 0", ["--blocks 0", "1 to 1024"]),
        ("--lose 40", ["--lose 40", "0 to 39"]),
        ("--lose -1", ["--lose -1", "0 to 39"]),
        ("--lose 1,x", ["--lose", "'1,x'", "commas"]),
        ("--store-tp 3", ["--store-tp 3", "1, 2, 4, 8", "multiples of 8"]),
        ("--load-tp 12", ["--load-tp 12", "1, 2, 4, 8"]),
        ("--load-tp 0", ["--load-tp 0", "1 to 128"]),
        ("--store-layout nhb", ["--store-layout", "'nhb'", "nhd, hnd", "split"]),
        ("--load-layout x", ["--load-layout", "'x'", "nhd, hnd"]),
        ("--blocks-per-chunk 257", ["--blocks-per-chunk 257", "1 to 256"]),
    ],
)
def test_a_bad_option_names_the_value_and_what_is_allowed(
    arguments: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments.split()]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert not [name for name in names if name not in err]


def test_a_bad_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--blocks", "many"]) == BAD_INPUT
    assert "many" in capsys.readouterr().err


def test_a_root_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--blocks", "2", "--root", str(tmp_path / "file")]) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tmp_path / "file") in err


def test_a_wrong_byte_that_was_loaded_is_found(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one loaded block is turned after the engine said that all is well."""
    wait = TransferEngine.wait

    def lying(self: TransferEngine, job_ids: Any, timeout: float | None = None) -> Any:
        results = wait(self, job_ids, timeout)
        if 2 in results:
            pages = self._pages[1]
            page = pages.flat(7)
            page[np.flatnonzero(page != 0xA5)[1000]] ^= 1
        return results

    monkeypatch.setattr(TransferEngine, "wait", lying)
    code, report = demo("--blocks", "4")
    assert (code, report["bytes_wrong"]) == (WRONG_BYTES, 1)


def test_a_byte_written_where_nothing_arrived_is_found(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = TransferEngine.wait

    def spilling(self: TransferEngine, job_ids: Any, timeout: float | None = None) -> Any:
        results = wait(self, job_ids, timeout)
        if 2 in results:
            page = self._pages[0].flat(0)
            page[np.flatnonzero(page == 0xA5)[:3]] = 0
        return results

    monkeypatch.setattr(TransferEngine, "wait", spilling)
    code, report = demo("--blocks", "4")
    assert code == WRONG_BYTES
    assert report["bytes_wrong"] == 3


def test_a_converter_that_errs_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scatter = native.scatter

    def erring(src: Any, block_ids: Any, mapping: Any, pages: Any, sums: Any = None, *, threads: int = 1) -> None:
        scatter(src, block_ids, mapping, pages, sums, threads=threads)
        pages.flat(0)[int(block_ids[0, 0]) * mapping.tensors[0].block_stride] ^= 0x80

    monkeypatch.setattr(native, "scatter", erring)
    assert main(["demo", "--blocks", "4"]) == WRONG_BYTES
    assert "4 WRONG" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvxfer {kvxfer.__version__}\n"
    assert main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out


def test_an_error_on_purpose_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("capacity_bytes=1 holds no slab")

    monkeypatch.setattr("kvxfer.cli.demo.run", fail)
    assert main(["demo"]) == BAD_INPUT
    assert capsys.readouterr().err == "kvxfer: ConfigError: capacity_bytes=1 holds no slab\n"
