"""Series: declared ahead, at zero from the start, never going down, in a text that scrapers read."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.jobs import Status
from kvxfer.metrics import Kind, Series, Tally, Values, add_up, expose
from kvxfer.observe import COUNTED, ENGINE_SERIES, SERIES, STORE_SERIES, Metrics, add_up_stores, together
from kvxfer.store.stats import EVICTION_REASONS, INVALIDATION_REASONS

TABLE = (
    Series("t_jobs_total", Kind.COUNTER, "Jobs.", "jobs", (("way", ("in", "out")),)),
    Series("t_open", Kind.GAUGE, 'With a \\ and\na line, and "quotes".'),
    Series("t_seconds", Kind.HISTOGRAM, "Time.", "seconds", (("path", ('a "b" \\ c',)),), (0.1, 1.0)),
)
_SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """A strict reader of the text format: every line is a comment it knows or a sample of the family before it."""
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    family = kind = ""
    assert text == "" or text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family, kind = line.split(" ", 3)[2], ""
            assert not any(name == family for name, _ in samples), f"{family} comes twice"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and kind in ("counter", "gauge", "histogram")
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            name, inside, value = found.groups()
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert name in [family + suffix for suffix in suffixes], line
            labels = tuple(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', inside or ""))
            assert (name, labels) not in samples, line
            samples[name, labels] = float(value)
    return samples


def test_everything_is_there_at_zero_before_anything_is_counted() -> None:
    tally = Tally(TABLE)
    samples = parse(expose(TABLE, tally.values()))
    assert set(samples.values()) == {0.0}
    assert [name for name, _ in samples] == ["t_jobs_total"] * 2 + ["t_open"] + ["t_seconds_bucket"] * 3 + [
        "t_seconds_sum",
        "t_seconds_count",
    ]


def test_what_was_not_declared_cannot_be_counted() -> None:
    tally = Tally(TABLE)
    for call in (
        lambda: tally.add("t_other_total", 1),
        lambda: tally.add("t_jobs_total", 1, "sideways"),
        lambda: tally.add("t_jobs_total", 1),
        lambda: tally.observe("t_seconds", 1.0, "elsewhere"),
    ):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(ValueError, match="t_jobs_total cannot go down by 1"):
        tally.add("t_jobs_total", -1, "in")
    assert tally.values() == Tally(TABLE).values()


@given(st.lists(st.one_of(st.floats(0, 5), st.sampled_from([0.1, 1.0]))))
def test_buckets_are_cumulative_and_take_their_upper_bound(values: list[float]) -> None:
    tally = Tally(TABLE)
    for value in values:
        tally.observe("t_seconds", value, 'a "b" \\ c')
    samples = parse(expose(TABLE, tally.values()))
    by_bound = {dict(labels)["le"]: count for (name, labels), count in samples.items() if name == "t_seconds_bucket"}
    assert by_bound == {
        "0.1": sum(v <= 0.1 for v in values),
        "1.0": sum(v <= 1.0 for v in values),
        "+Inf": len(values),
    }
    by_name = {name: value for (name, _), value in samples.items()}
    assert by_name["t_seconds_count"] == len(values) and math.isclose(by_name["t_seconds_sum"], sum(values))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_parts_add_up(parts: list[tuple[int, int]]) -> None:
    tallies = []
    for jobs, slow in parts:
        tallies.append(tally := Tally(TABLE))
        tally.add("t_jobs_total", jobs, "in")
        for _ in range(slow):
            tally.observe("t_seconds", 2.0, 'a "b" \\ c')
    total = add_up(tally.values() for tally in tallies)
    assert total.get(("t_jobs_total", ("in",)), 0) == sum(jobs for jobs, _ in parts)
    slow = sum(slow for _, slow in parts)
    assert total.get(("t_seconds", ('a "b" \\ c',)), (0, 0, 0, 0)) == (0, 0, slow, 2.0 * slow)


def test_of_what_has_no_sum_the_least_counts() -> None:
    """Of several stores' last scrubs the one that is longest ago; a store that was never scrubbed is 0."""
    name = ("kvxfer_last_scrub_timestamp_seconds", ())
    parts: list[Values] = [
        {name: 1_800_000_000, ("kvxfer_slabs", ()): 2},
        {name: 1_700_000_000, ("kvxfer_slabs", ()): 3},
    ]
    assert add_up_stores(parts) == {name: 1_700_000_000, ("kvxfer_slabs", ()): 5}
    assert add_up_stores([*parts, {name: 0}])[name] == 0
    assert together([Metrics({}, part, number) for number, part in enumerate(parts)], 9).store == add_up_stores(parts)


def test_a_value_that_is_missing_is_not_passed_over() -> None:
    with pytest.raises(KeyError, match="t_open"):
        expose(TABLE, {("t_jobs_total", ("in",)): 1, ("t_jobs_total", ("out",)): 1})


@pytest.mark.parametrize(
    "name, kind, unit, buckets, message",
    [
        ("t_jobs", Kind.COUNTER, "jobs", (), "end with _total"),
        ("t_jobs_total", Kind.GAUGE, "jobs", (), "end with _total"),
        ("t_time", Kind.GAUGE, "seconds", (), "must say that it is in seconds"),
        ("t_read_total", Kind.COUNTER, "bytes", (), "must say that it is in bytes"),
        ("t_seconds", Kind.HISTOGRAM, "seconds", (), "buckets"),
        ("t_seconds", Kind.HISTOGRAM, "seconds", (1.0, 0.5), "must ascend"),
        ("t_seconds", Kind.GAUGE, "seconds", (1.0,), "belong to histograms"),
    ],
)
def test_names_say_unit_and_kind(name: str, kind: Kind, unit: str, buckets: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Series(name, kind, "", unit, (), buckets)


def test_the_table_of_kvxfer() -> None:
    names = [series.name for series in SERIES]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"kvxfer_[a-z_]+", name) for name in names)
    assert all(series.help.endswith(".") for series in SERIES)
    assert (*ENGINE_SERIES, *STORE_SERIES) == SERIES
    by_name = {series.name: dict(series.labels) for series in SERIES}
    assert by_name["kvxfer_evicted_chunks_total"]["reason"] == EVICTION_REASONS
    assert by_name["kvxfer_invalidated_chunks_total"]["reason"] == INVALIDATION_REASONS
    ends = {status.name.lower() for status in Status} - {"ok", "pending"}
    assert ends < set(by_name["kvxfer_load_chunks_total"]["outcome"])
    assert ends < set(by_name["kvxfer_store_chunks_total"]["outcome"])
    assert not any(series.kind is Kind.GAUGE for series in COUNTED), "a tally only counts"


def test_prometheus_reads_the_text() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    tally = Tally(TABLE)
    tally.add("t_jobs_total", 3, "out")
    tally.observe("t_seconds", 0.5, 'a "b" \\ c')
    text = expose(TABLE, tally.values() | {("t_open", ()): 2})
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "t_jobs": "counter",
        "t_open": "gauge",
        "t_seconds": "histogram",
    }
    assert families["t_open"].documentation == TABLE[1].help
    read = {(s.name, tuple(s.labels.items())): s.value for family in families.values() for s in family.samples}
    assert read["t_jobs_total", (("way", "out"),)] == 3 and read["t_open", ()] == 2
    assert read["t_seconds_bucket", (("path", 'a "b" \\ c'), ("le", "1.0"))] == 1
    assert len(read) == len(parse(text))
