"""`kvxfer bench gds`: what every option measures, plots and puts beside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvxfer.cli import bench_plot, main
from kvxfer.testing import FaultyIO
from tests.cli.bench_gds_rig import QUICK, WHOLE, Capsys, K, M, bench, nothing_left
from tests.cli.commands import forked, json_of

__all__ = ["nothing_left"]


@pytest.mark.parametrize("operation", ["read", "write", "mixed"])
@pytest.mark.parametrize(("mode", "layout"), [("auto", "random"), ("direct", "sequential"), ("buffered", "random")])
def test_every_way_is_measured_and_checked(
    tmp_path: Path, capsys: Capsys, operation: str, mode: str, layout: str
) -> None:
    code, report = bench(capsys, tmp_path, "--operation", operation, "--mode", mode, "--layout", layout, "--threads", 2)
    (row,) = report["rows"]
    assert (code, report["ok"], report["schema"], row["status"], row["errors"]) == (0, True, 1, "ok", {})
    assert report["mode"] == mode or (mode == "auto" and report["mode"] in ("direct", "buffered"))
    assert report["memory"] == "host"
    kinds = ["read", "write"] if operation == "mixed" else [operation]
    assert [part["operation"] for part in row["parts"]] == kinds
    for part in row["parts"]:
        assert part["gbps"] == pytest.approx(part["iops"] * 64 * K / 1e9)
        assert len(part["gbps_runs"]) == 3
        assert min(part["gbps_runs"]) <= part["gbps"] <= max(part["gbps_runs"])
        assert 0 < part["latency_us"]["p50"] <= part["latency_us"]["p90"] <= part["latency_us"]["max"]
    timed = sum(part["requests"] for part in row["parts"])
    assert timed == row["requests"] >= 30
    assert row["checked_bytes"] >= timed * 64 * K
    assert row["cpu_cores"] > 0 and row["cpu_s_per_gb"] > 0 and row["tool_percent"] > 0
    assert report["empty_calls_per_s"] > 100
    assert "every byte" in report["verified"]


def test_sizes_are_measured_each_and_their_spelling_is_free(tmp_path: Path, capsys: Capsys) -> None:
    _, report = bench(capsys, tmp_path, "--sizes", "4k,65536,1 MiB,512KiB", "--span", "0.5G".replace("0.5G", "16M"))
    assert [row["size"] for row in report["rows"]] == [4 * K, 64 * K, M, 512 * K]


def test_a_person_sees_a_table(tmp_path: Path) -> None:
    done = forked(
        "bench", "gds", tmp_path, *QUICK, "--sizes", "64K,128K", "--drive-gbps", "2.5", "--operation", "mixed"
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for text in ("64.0 KiB", "128.0 KiB", "read", "write", "2.50 GB/s (--drive-gbps)", "not crossed", "checked  ",
                 "1 threads x 4 in flight", "requests/s", "mixed (70% reads)"):  # fmt: skip
        assert text in done.stdout, done.stdout
    assert "2 of 2 sizes" in done.stderr


def test_a_read_percentage_is_kept(tmp_path: Path, capsys: Capsys) -> None:
    _, report = bench(capsys, tmp_path, "--operation", "mixed", "--read-percent", "10", "--sizes", "4K")
    reads, writes = (part["requests"] for part in report["rows"][0]["parts"])
    assert 0.03 < reads / (reads + writes) < 0.2


def test_a_limit_and_repetitions_are_kept(tmp_path: Path, capsys: Capsys) -> None:
    _, report = bench(capsys, tmp_path, "--limit", "6M", "--repetitions", 2)
    (row,) = report["rows"]
    assert row["requests"] * 64 * K == 6 * M
    assert len(row["parts"][0]["gbps_runs"]) == 2


def test_a_duration_is_kept(tmp_path: Path, capsys: Capsys) -> None:
    _, report = bench(capsys, tmp_path, "--limit", "100T", "--duration", 0.3, "--sizes", "4K")
    (row,) = report["rows"]
    assert 0.29 < row["seconds"] < 5  # the last request may take its time
    assert len(row["parts"][0]["gbps_runs"]) == 3


def test_what_the_page_cache_holds_is_not_the_drives_speed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, advice: forgotten.append(advice))
    _, report = bench(capsys, tmp_path, "--mode", "buffered", *WHOLE)
    assert report["rows"][0]["requests"] == 128
    assert forgotten == [os.POSIX_FADV_DONTNEED] * 3  # after the filling, and before each of two bursts
    bench(capsys, tmp_path, "--mode", "direct", *WHOLE)
    assert len(forgotten) == 3


def test_a_run_that_is_too_short_has_no_result(tmp_path: Path, capsys: Capsys) -> None:
    code, report = bench(capsys, tmp_path, "--sizes", "1M", "--limit", "8M")
    (row,) = report["rows"]
    assert (code, row["status"], row["parts"]) == (0, "too few", [])
    assert "too few for a result (at least 30)" in row["why"]
    assert row["cpu_cores"] is row["drive_percent"] is row["tool_percent"] is None


def test_a_share_of_the_drive_is_told_where_it_is_known(tmp_path: Path, capsys: Capsys) -> None:
    _, report = bench(capsys, tmp_path, "--drive-gbps", "4")
    (row,) = report["rows"]
    assert row["drive_percent"] == pytest.approx(100 * row["parts"][0]["gbps"] / 4)
    assert (row["link_percent"], report["link"]["gbps"]) == (None, None)
    assert "not crossed" in report["link"]["why"]
    assert report["drive"]["gbps_why"] == "--drive-gbps"


def test_a_drive_that_nobody_knows_is_never_guessed(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvxfer.cli import bench_job
    from kvxfer.topology import Drive, Link

    monkeypatch.setattr(bench_job, "drive_of", lambda _: Drive(why="no drive under it"))
    _, report = bench(capsys, tmp_path)
    assert report["drive"]["gbps"] is report["rows"][0]["drive_percent"] is None
    assert report["drive"]["gbps_why"] == "no drive under it; --drive-gbps says it"
    monkeypatch.setattr(bench_job, "drive_of", lambda _: Drive(("nvme0n1",), 0, (Link(4, 4),)))
    _, report = bench(capsys, tmp_path)
    assert report["drive"]["gbps"] == pytest.approx(7.877, rel=1e-3)
    assert report["drive"]["gbps_why"] == "its link, PCIe 4 x4"
    assert report["rows"][0]["drive_percent"] > 0


# ---- without a GPU


@pytest.mark.parametrize(
    "arguments", ["--memory device", "--mode gds", "--mode compat", "--memory device --mode direct"]
)
def test_what_needs_a_gpu_says_that_there_is_none(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    from kvxfer import probe

    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(False, "no driver here"))
    code, said = json_of(capsys, "bench", "gds", tmp_path, *QUICK[2:], *arguments.split())
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert said["error"]["message"] == f"{' '.join(arguments.split()[:2])}: no CUDA device: no driver here"


def test_auto_steps_down_and_says_why(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer import probe

    monkeypatch.setattr(probe, "cuda", lambda *_: probe.Probe(False, "no driver here"))
    code, report = json_of(capsys, "bench", "gds", tmp_path, *QUICK[2:])
    assert (code, report["memory"]) == (0, "host")
    assert report["steps"][0] == "gds and compat: no CUDA device: no driver here"
    _, report = bench(capsys, tmp_path)
    assert "--memory host was said" in report["steps"][0]


# ---- plot and peer


def test_without_matplotlib_there_is_no_run(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_plot, "find_spec", lambda _: None)
    opens = FaultyIO.calls("open")
    code, said = bench(capsys, tmp_path, "--plot", tmp_path / "picture.png")
    assert (code, "matplotlib, which is not installed" in said["error"]["message"]) == (2, True)
    assert FaultyIO.calls("open") == opens


DRAWN = """
import json, sys, types
calls = []
class Anything:
    def __init__(self, name): self.name = name
    def __getattr__(self, name): return Anything(f"{self.name}.{name}")
    def __call__(self, *arguments, **named):
        calls.append([self.name, [list_of(each) for each in arguments], sorted(named)])
        if self.name == "pyplot.subplots": return Anything("figure"), Anything("axes")
        if self.name == "figure.savefig": arguments[0].write_text(json.dumps(calls))
def list_of(value): return value if isinstance(value, (list, int, float)) else str(value)
pyplot = Anything("pyplot")
use = Anything("use")
"""


def test_a_picture_has_a_point_for_every_size(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    double = ModuleType("matplotlib")
    exec(DRAWN, double.__dict__)
    monkeypatch.setitem(sys.modules, "matplotlib", double)
    monkeypatch.setattr(bench_plot, "find_spec", lambda _: True)
    picture = tmp_path / "picture.svg"
    code, report = bench(capsys, tmp_path, "--sizes", "64K,256K", "--plot", picture, "--drive-gbps", 3)
    assert code == 0
    calls = {name: arguments for name, arguments, _ in json.loads(picture.read_text())}
    sizes, middle = calls["axes.errorbar"]
    assert sizes == [64 * K, 256 * K]
    assert middle == pytest.approx([row["parts"][0]["gbps"] for row in report["rows"]])
    assert calls["axes.axhline"] == [3]


FIO = """#!{python}
import json, os, sys
with open({log!r}, "a") as log: log.write(json.dumps(sys.argv[1:] + [os.getcwd()]) + "\\n")
if {code}: sys.exit("fio: no such engine")
part = {{"total_ios": 10, "bw_bytes": 2500000000, "iops": 1234.5, "clat_ns": {{"max": 9000,
    "percentile": {{"50.000000": 1000, "90.000000": 2000, "99.000000": 3000, "99.900000": 4000}}}}}}
print("fio says hello")
print(json.dumps({{"jobs": [{{"read": part, "write": {{"total_ios": 0}}}}]}}))
"""


def fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> Path:
    folder, log = tmp_path / "bin", tmp_path / "fio.log"
    folder.mkdir()
    (folder / "fio").write_text(FIO.format(python=sys.executable, log=str(log), code=code))
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_fio_runs_the_same_sizes_beside_it(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fio(tmp_path, monkeypatch, 0)
    code, report = bench(
        capsys,
        tmp_path,
        "--sizes",
        "64K,128K",
        "--peer",
        "fio",
        "--mode",
        "direct",
        "--threads",
        2,
        "--layout",
        "random",
    )
    assert (code, [row["size"] for row in report["peer"]]) == (0, [64 * K, 128 * K])
    (part,) = report["peer"][0]["parts"]
    assert part == {
        "operation": "read", "gbps": 2.5, "iops": 1234.5,
        "latency_us": {"p50": 1.0, "p90": 2.0, "p99": 3.0, "p99_9": 4.0, "max": 9.0},
    }  # fmt: skip
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert {"--bs=65536", "--numjobs=2", "--iodepth=4", "--direct=1", "--rw=randread", "--runtime=600000ms"} <= set(
        first
    )
    assert "--bs=131072" in second
    assert Path(first[-1]).parent == tmp_path
    assert main(["bench", "gds", str(tmp_path), *QUICK, "--peer", "fio", "--mode", "buffered"]) == 0
    out = capsys.readouterr().out
    assert "read, fio" in out and "2.50" in out and "its bytes are not checked" in out
    third = json.loads(log.read_text().splitlines()[-1])
    assert {"--ioengine=psync", "--numjobs=4", "--iodepth=1", "--direct=0"} <= set(third)


@pytest.mark.parametrize("name", [".", "a:b"])
def test_fio_stays_in_a_folder_of_its_own(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It takes its --directory from where it is started, and splits it at colons."""
    log = fio(tmp_path, monkeypatch, 0)
    (tmp_path / "a:b").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _ = bench(capsys, name, "--peer", "fio", *WHOLE)
    *arguments, folder = json.loads(log.read_text())
    (said,) = [each.removeprefix("--directory=") for each in arguments if each.startswith("--directory=")]
    assert (code, Path(folder).parent) == (0, (tmp_path / name).resolve())
    assert {os.path.normpath(os.path.join(folder, part)) for part in said.split(":")} == {folder}


def test_a_fio_that_fails_costs_its_own_figures(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio(tmp_path, monkeypatch, 1)
    code, report = bench(capsys, tmp_path, "--peer", "fio")
    assert (code, report["rows"][0]["status"], report["peer"][0]["parts"]) == (0, "ok", [])
    assert "no such engine" in report["peer"][0]["why"]


def test_without_fio_there_is_no_run(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = bench(capsys, tmp_path, "--peer", "fio")
    assert (code, said["error"]["message"]) == (2, "--peer fio: fio is not installed")
