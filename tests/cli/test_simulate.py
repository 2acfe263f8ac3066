"""`kvxfer simulate`: what it says, what it refuses, and that no trace makes it fail otherwise."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.cli import BAD_INPUT, bench_plot, main, simulate_job, simulate_plan
from kvxfer.errors import ConfigError
from kvxfer.policy import POLICIES
from kvxfer.simulate import survey
from tests.cli.commands import PROJECT, forked, json_of
from tests.simulate.prompts import write

SAMPLE = PROJECT / "tests" / "data" / "conversation-500.jsonl"
Capsys = pytest.CaptureFixture[str]
# Three prompts of two and three blocks of four tokens, two days apart.
DAY = 86_400_000
TINY = [(0, 8, [0, 1]), (DAY, 12, [0, 1, 2]), (2 * DAY, 8, [3, 4])]


def simulate(capsys: Capsys, *arguments: object) -> tuple[int, dict[str, Any]]:
    return json_of(capsys, "simulate", *arguments)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The sample's first requests."""
    path = tmp_path / "head.jsonl"
    path.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:60]))
    return path


def tiny(capsys: Capsys, path: Path, *arguments: object) -> dict[str, Any]:
    write(path / "tiny.jsonl", TINY)
    code, report = simulate(capsys, path / "tiny.jsonl", "--block-tokens", 4, "--bytes-per-token", 250, *arguments)
    assert code == 0, report
    return report


def test_what_a_trace_is_worth(tmp_path: Path, capsys: Capsys) -> None:
    report = tiny(capsys, tmp_path, "--capacity", "100%", "--policy", "lru")
    found = [report[name] for name in ("requests", "seconds", "prompt_tokens", "blocks", "distinct_blocks")]
    assert found == [3, 172_800, 28, 7, 5]
    assert (report["block_bytes"], report["footprint_bytes"]) == (1000, 5000)
    best = report["unbounded"]
    assert (best["token_hit_ratio"], best["block_hit_ratio"], best["recomputed_tokens"]) == (8 / 28, 2 / 7, 20)
    (row,) = report["rows"]
    assert {name: row[name] for name in best} == best
    assert [row[name] for name in ("hit_tokens", "written_bytes", "evicted_bytes", "held_bytes", "peak_bytes")] == [
        8, 5000, 0, 5000, 5000,
    ]  # fmt: skip
    assert (row["unreachable_share"], row["operations"], row["capacity_bytes"]) == (0, 7 + 2 + 5, 5000)
    assert row["dropped_blocks"] == {"second_touch": 0, "budget": 0, "no_room": 0}


def test_every_combination_has_a_row(head: Path, capsys: Capsys) -> None:
    code, report = simulate(
        capsys, head, "--capacity", "2%, 5%", "--capacity", "40GiB", "--policy", "all", "--admission",
        "always,second-touch", "--budget", "none", "--budget", "100MB/s", "--budget", "1dwpd", "--drive", "3.84TB",
        "--block-tokens", 512, "--bytes-per-token", 131072,
    )  # fmt: skip
    assert code == 0
    names = [(row["policy"], row["capacity"], row["admission"], row["budget"]) for row in report["rows"]]
    assert len(names) == len(set(names)) == len(POLICIES) * 3 * 2 * 3
    budgets = {row["budget"]: row["budget_bytes_per_s"] for row in report["rows"]}
    assert budgets == {"none": None, "100MB/s": 1e8, "1dwpd": pytest.approx(3.84e12 / 86400)}
    assert report["block_bytes"] == 64 << 20
    assert {row["capacity"]: row["capacity_bytes"] >> 26 for row in report["rows"]} == {
        "2%": report["distinct_blocks"] // 50, "5%": report["distinct_blocks"] // 20, "40GiB": 640,
    }  # fmt: skip
    for row in report["rows"]:
        assert row["token_hit_ratio"] <= report["unbounded"]["token_hit_ratio"]
        assert row["recomputed_tokens"] + row["hit_tokens"] == report["prompt_tokens"]
        assert row["held_bytes"] == row["written_bytes"] - row["evicted_bytes"] <= row["peak_bytes"]
        assert row["peak_bytes"] <= row["capacity_bytes"]
        assert (row["dropped_blocks"]["second_touch"] > 0) == (row["admission"] == "second-touch")
        if row["budget_bytes_per_s"]:
            assert row["written_bytes"] <= row["budget_bytes_per_s"] * (report["seconds"] + 60)


def test_how_long_a_drive_lives(tmp_path: Path, capsys: Capsys) -> None:
    """5,000 bytes in two days are 0.25 writes a day of 10,000 bytes."""
    drive = ("--capacity", "100%", "--policy", "lru", "--drive", "10000")
    report = tiny(capsys, tmp_path, *drive, "--dwpd", 1, "--warranty-years", 4)
    (row,) = report["rows"]
    assert (row["drive_writes_per_day"], row["drive_life_years"]) == (pytest.approx(0.25), pytest.approx(16))
    assert row["written_bytes_per_s"] == pytest.approx(5000 / 172_800)
    (row,) = tiny(capsys, tmp_path, *drive, "--tbw", 1e-6, "--write-amplification", 2)["rows"]  # 10**6 bytes
    assert (row["drive_writes_per_day"], row["drive_life_years"]) == (
        pytest.approx(0.5), pytest.approx(200 / 365.25),
    )  # fmt: skip
    (row,) = tiny(capsys, tmp_path, *drive)["rows"]
    assert (row["drive_writes_per_day"], row["drive_life_years"]) == (pytest.approx(0.25), None)
    nothing = tiny(capsys, tmp_path, *drive, "--dwpd", 1, "--admission", "second-touch", "--capacity", "1000")
    assert [(each["written_bytes"] > 0, each["drive_life_years"] is None) for each in nothing["rows"]] == [
        (True, False), (True, False),
    ]  # fmt: skip


def test_a_trace_that_takes_no_time_says_nothing_of_a_drives_life(tmp_path: Path, capsys: Capsys) -> None:
    trace = write(tmp_path / "trace.jsonl", [(7, 4, [0])])
    code, report = simulate(capsys, trace, "--block-tokens", 4, "--capacity", "1G", "--tbw", 100, "--drive", "1TB")
    row = report["rows"][0]
    assert (code, row["drive_life_years"], row["drive_writes_per_day"], row["written_bytes_per_s"]) == (
        0, None, None, None,
    )  # fmt: skip
    assert main(["simulate", str(trace), "--block-tokens", "4", "--capacity", "1G", "--tbw", "100"]) == 0
    assert "life: unknown, all requests came at once" in capsys.readouterr().out


def test_the_bytes_of_a_block(tmp_path: Path, head: Path, capsys: Capsys) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    for arguments, expected in (
        ((), 64 << 20),
        (("--model", "deepseek-v3"), 512 * 61 * 576 * 2),
        (("--model", "llama-3.1-8b", "--dtype", "float8_e4m3fn"), 32 << 20),
        (("--model", tmp_path), 512 * 2 * 2 * 64 * 2),
        (("--model", tmp_path / "config.json", "--dtype", "float32"), 512 * 2 * 2 * 64 * 4),
        (("--bytes-per-token", 10), 5120),
    ):
        code, report = simulate(capsys, head, "--policy", "lru", "--capacity", "5%", *arguments)
        assert (code, report["block_bytes"]) == (0, expected), arguments


def test_the_view_has_what_the_object_has(head: Path, capsys: Capsys) -> None:
    done = forked("simulate", head, "--capacity", "2%,4MB", "--bytes-per-token", "100", "--drive", "1TB", "--dwpd", "3")
    assert (done.returncode, done.stderr) == (0, "")
    _, report = simulate(capsys, head, "--capacity", "2%,4MB", "--bytes-per-token", 100, "--drive", "1TB")
    assert f"60 requests in {report['seconds']:,.0f} s, {report['prompt_tokens']:,} prompt tokens" in done.stdout
    assert f"{report['distinct_blocks']:,} different blocks of 512 tokens, 50.0 KiB each" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(tuple(POLICIES))]
    assert len(lines) == len(report["rows"]) == 2 * len(POLICIES)
    for words, row in zip(lines, report["rows"], strict=True):
        assert (words[0], words[1]) == (row["policy"], row["capacity"])
        assert f"{100 * row['token_hit_ratio']:.2f}%" in words
        assert f"{row['recomputed_tokens']:,}" in words
    assert f"{100 * report['unbounded']['token_hit_ratio']:.2f}%" in done.stdout
    assert main(["simulate", str(head), "--capacity", "300k", "--bytes-per-token", "100"]) == 0
    assert "no_room: blocks of prompts that are longer" in capsys.readouterr().out


REFUSED = {
    "--policy fifo": "--policy 'fifo': allowed are lru, arc, s3fifo",
    "--policy ,": "--policy ''",
    "--capacity 0%": "--capacity '0%'",
    "--capacity -1%": "--capacity '-1%'",
    "--capacity nan%": "--capacity 'nan%'",
    "--capacity 0": "--capacity '0': allowed are sizes",
    "--capacity 5XB": "--capacity '5XB'",
    "--capacity 999999P": "up to 2**60",
    "--capacity 1M": "--capacity 1M holds no block: one takes 67108864 bytes",
    "--capacity 0.001%": "--capacity 0.001% holds no block",
    "--admission never": "--admission 'never': allowed are always, second-touch",
    "--budget fast": "--budget 'fast'",
    "--budget 0dwpd --drive 1T": "--budget 0dwpd",
    "--budget 1dwpd": "need --drive",
    "--budget 1 --bytes-per-token 1048576": "--budget 1 never pays for a block of 536870912 bytes",
    "--second-touch-names 0": "--second-touch-names 0",
    "--drive 0": "--drive '0'",
    "--dwpd 1": "--dwpd needs --drive",
    "--dwpd nan --drive 1T": "--dwpd nan",
    "--dwpd 1 --tbw 1 --drive 1T": "two names of one rating",
    "--tbw 0": "--tbw 0.0",
    "--tbw inf": "--tbw inf",
    "--write-amplification 0.5": "--write-amplification 0.5",
    "--warranty-years -1": "--warranty-years -1.0",
    "--model nobody": "--model 'nobody': neither a file nor one of llama-3.1-8b",
    "--dtype int3": "--dtype 'int3'",
    "--bytes-per-token 0": "--bytes-per-token 0",
    "--block-tokens 0": "--block-tokens 0",
    "--block-tokens 16": "line 1: 14 hash_ids for input_length=6758: one for each 16",
    "--plot picture.jpg": "allowed endings",
    f"--capacity {','.join(f'{n}%' for n in range(1, 200))}": "597 combinations of the options: allowed are 500",
}


@pytest.mark.parametrize(("options", "message"), REFUSED.items())
def test_what_is_refused_by_name(capsys: Capsys, options: str, message: str) -> None:
    code, said = simulate(capsys, SAMPLE, *options.split())
    assert code == BAD_INPUT
    assert message in said["error"]["message"]


def test_what_is_unreachable_is_shown(head: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_job, "share", lambda outcome: 0.125)
    assert main(["simulate", str(head), "--policy", "lru", "--capacity", "5%"]) == 0
    assert "12.50%" in capsys.readouterr().out


def test_a_minutes_worth_of_a_budget_may_be_written_at_once(tmp_path: Path, capsys: Capsys) -> None:
    """At least 256 MiB, as a store has it: here 5 blocks of 50 MiB; and 60 s of 10 MiB a second are 12."""
    trace = write(tmp_path / "trace.jsonl", [(0, 4 * 20, list(range(20)))])
    code, report = simulate(
        capsys, trace, "--policy", "lru", "--capacity", "1T", "--block-tokens", 4, "--bytes-per-token", 50 << 18,
        "--budget", "1M,10M",
    )  # fmt: skip
    assert (code, [row["written_bytes"] // (50 << 20) for row in report["rows"]]) == (0, [5, 12])


def test_a_model_of_several_kinds_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    config = {"model_type": "gemma2", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
              "sliding_window": 16, "torch_dtype": "float16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, said = simulate(capsys, SAMPLE, "--model", tmp_path)
    assert (code, "say --bytes-per-token" in said["error"]["message"]) == (2, True)


def test_no_file_and_one_that_changes(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = simulate(capsys, tmp_path / "nothing")
    assert (code, said["error"]["type"]) == (2, "FileNotFoundError")
    trace = write(tmp_path / "trace.jsonl", TINY)
    look = survey

    def and_then_changes(path: Path, block_tokens: int) -> Any:
        found = look(path, block_tokens)
        path.write_text("anything\n")
        return found

    monkeypatch.setattr(simulate_job, "survey", and_then_changes)
    code, said = simulate(capsys, trace, "--block-tokens", 4, "--capacity", "1G")
    assert (code, "was changed while it was read" in said["error"]["message"]) == (2, True)


# ---- the picture


def test_without_matplotlib_nothing_is_simulated(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_plot, "find_spec", lambda _: None)
    monkeypatch.setattr(simulate_job, "run", lambda _: pytest.fail("it was"))
    code, said = simulate(capsys, SAMPLE, "--plot", "picture.png")
    assert (code, "matplotlib, which is not installed" in said["error"]["message"]) == (2, True)


def test_the_picture_has_a_line_for_each_policy(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a double that keeps what is drawn: matplotlib is not among the packages of the tests."""
    drawn: list[tuple[str, Any]] = []

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *values, **named: drawn.append((name, (values, named)))

    pyplot, matplotlib = ModuleType("matplotlib.pyplot"), ModuleType("matplotlib")
    pyplot.subplots, pyplot.close = lambda **_: (Anything(), Anything()), lambda _: None  # type: ignore[attr-defined]
    matplotlib.use, matplotlib.pyplot = lambda _: None, pyplot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.setattr(bench_plot, "find_spec", lambda _: True)
    report = tiny(capsys, tmp_path, "--capacity", "60%,20%", "--plot", tmp_path / "picture.svg", "--budget", "none,1K")
    lines = {named["label"]: values for name, (values, named) in drawn if name == "plot"}
    assert set(lines) == {f"{policy}, budget {text}" for policy in POLICIES for text in ("none", "1K")}
    for row in report["rows"]:
        sizes, ratios = lines[f"{row['policy']}, budget {row['budget']}"]
        assert sizes == (1000, 3000)
        assert ratios[sizes.index(row["capacity_bytes"])] == pytest.approx(100 * row["token_hit_ratio"])
    ((bound,), _) = next(what for name, what in drawn if name == "axhline")
    assert bound == pytest.approx(100 * report["unbounded"]["token_hit_ratio"])
    assert next(what for name, what in drawn if name == "savefig")[0] == (tmp_path / "picture.svg",)


# ---- whatever it is given

NUMBERS = st.integers(-2, 20) | st.integers() | st.floats() | st.just(10**400)
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    blocks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    record: dict[str, Any] = {
        "timestamp": draw(st.integers(0, 3)), "input_length": 4 * len(blocks), "output_length": 0, "hash_ids": blocks,
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        record[name] = draw(JUNK)
    line = json.dumps(record).encode() if draw(st.integers(0, 9)) else json.dumps(draw(JUNK)).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(max_size=4)) + line[at + draw(st.integers(0, 3)) :]
    return line


FILES = st.lists(lines(), max_size=4) | st.binary(max_size=60).map(lambda data: [data])
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
MANY = settings(FEW, max_examples=150)


@settings(FEW, max_examples=30)
@given(FILES)
def test_whatever_is_in_a_trace_is_simulated_or_refused(tmp_path: Path, rows: list[bytes]) -> None:
    check_plan(tmp_path, rows)


@pytest.mark.slow
@settings(MANY)
@given(FILES)
def test_whatever_is_in_many_traces_is_simulated_or_refused(tmp_path: Path, rows: list[bytes]) -> None:
    check_plan(tmp_path, rows)


def check_plan(tmp_path: Path, rows: list[bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(rows))
    plan = simulate_plan.Plan.parse(
        trace=trace, policy=["all"], capacity=["2K"], admission=["always"], budget=["none"],
        drive=simulate_plan.Drive(), block_bytes=1024, block_tokens=4,
    )  # fmt: skip
    try:
        report = simulate_job.run(plan)
    except ConfigError as exc:
        assert str(exc).startswith(str(trace))  # noqa: PT017 - or it is simulated
    else:
        assert all(0 <= row.outcome.token_hit_ratio < 1 for row in report.rows)


def check_trace(tmp_path: Path, capsys: Capsys, rows: list[bytes]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(rows))
    options = ("--block-tokens", 4, "--capacity", "2K", "--bytes-per-token", 256)
    code = main(["simulate", str(trace), *map(str, options), "--json"])
    said = capsys.readouterr()
    report = json.loads(said.out)
    if code == 0:
        assert said.err == ""
        assert all(0 <= row["token_hit_ratio"] < 1 for row in report["rows"])
        assert all(math.isfinite(row["wall_s"]) for row in report["rows"])
    else:
        assert (code, said.err.count("\n")) == (BAD_INPUT, 1)
        assert report["error"]["type"] == "ConfigError"
        assert report["error"]["message"].startswith(str(trace))


OPTIONS = ("--policy", "--capacity", "--admission", "--budget", "--model", "--dtype", "--bytes-per-token",
           "--block-tokens", "--drive", "--tbw", "--dwpd", "--warranty-years", "--write-amplification")  # fmt: skip
WORDS = st.sampled_from(
    "lru arc,s3fifo all 1% 5%,20% 1e9% 100GiB 1 -1 0 1.5 nan inf 1e308 always second-touch none 1dwpd 50MB/s 3.84TB , "
    "llama-3.1-8b gpt-oss-120b / int8 512 4 9999999999999999999".split()
) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


def check_options(tmp_path: Path, capsys: Capsys, options: dict[str, str]) -> None:
    trace = write(tmp_path / "trace.jsonl", [(0, 600, [0, 1]), (1, 1000, [0, 2])])
    code = main(["simulate", str(trace), "--json", *(f"{name}={value}" for name, value in options.items())])
    said = capsys.readouterr()
    assert code in (0, BAD_INPUT)
    if code == 0:
        assert json.loads(said.out)["rows"]
    else:
        assert said.err  # how the command is used, or one line and an object
        assert not said.out or said.err.count("\n") == 1


GIVEN = st.dictionaries(st.sampled_from(OPTIONS), WORDS, max_size=4)


@FEW
@given(FILES)
def test_no_trace_is_a_traceback(tmp_path: Path, capsys: Capsys, rows: list[bytes]) -> None:
    check_trace(tmp_path, capsys, rows)


@FEW
@given(GIVEN)
def test_no_options_are_a_traceback(tmp_path: Path, capsys: Capsys, options: dict[str, str]) -> None:
    check_options(tmp_path, capsys, options)


@pytest.mark.slow
@MANY
@given(FILES, GIVEN)
def test_many_traces_and_options(tmp_path: Path, capsys: Capsys, rows: list[bytes], options: dict[str, str]) -> None:
    check_trace(tmp_path, capsys, rows)
    check_options(tmp_path, capsys, options)
