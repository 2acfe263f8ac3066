"""`kvxfer scrub`: its options, what it says and its JSON."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli import inspect_view, output
from kvxfer.cli.arguments import Root
from kvxfer.cli.inspect import finding_object
from kvxfer.cli.output import clean, moment, size
from kvxfer.store import Store
from kvxfer.store.scrub import Scrubbed, Scrubber, Throttle
from kvxfer.store.scrub_pass import read_scrubs

EPILOG = (
    "Exit codes: 0 everything that was read is right; 1 something was damaged, and is a miss now, or could not be "
    "read, or the root is of another version; 2 a bad option, no root there, or it cannot be opened; 130 interrupted "
    "in a pass that had found nothing wrong."
)
INTERRUPTED = 130
DEFAULT_RATE = 200_000_000  # bytes a second: what a drive that serves has to spare
_RATE = re.compile(r"([0-9]{1,9})(?:([KMGT])(i?)B?)?(?:/s)?")


def rate(text: str) -> int:
    """An option's bytes a second: `200MB/s` (powers of 1000), `200MiB/s` (of 1024), `200M`.

    Raises:
        typer.BadParameter: it is none.
    """
    match = _RATE.fullmatch(text)
    number = int(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2] or " ")) if match else 0
    if number < 1:
        raise typer.BadParameter(f"{text!r}: allowed are bytes a second, such as 200MB/s or 1GiB/s")
    return number


def command(
    root: Root,
    at_most: Annotated[
        int | None, typer.Option("--rate", parser=rate, metavar="RATE", help="Read at most so much (200MB/s).")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            parser=output.duration, metavar="TIME", help="Go on for ever: a pass, and the next 1d, ... later."
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin a pass, and go on with none that was cut short.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each pass.")] = False,
) -> None:
    """Read and check what is stored, at a bounded rate, while servers serve it. What is damaged becomes a miss.

    A pass that was cut short, by whomever, is gone on with.
    """
    code, told = 0, None
    with output.errors(as_json, damaged=output.FAILED), Store.open_existing(root) as store:
        stop = threading.Event()
        bytes_per_s = at_most or DEFAULT_RATE
        throttle = Throttle(bytes_per_s, stop.wait)
        scrubber = Scrubber(lambda: store, throttle, stop, anew=from_start)
        try:
            if not (as_json or from_start):
                _say_how_far(store, "going on with")
            while True:
                if not as_json:
                    _say_what_comes(store, bytes_per_s, from_start)
                done = scrubber.run()
                code = code or _code(done)
                _say(root, done, as_json)
                told = done
                if every is None:
                    break
                stop.wait(every)
        except KeyboardInterrupt:
            begun = scrubber.done
            if begun is not None and begun is not told:
                code = code or _code(begun)
                _say(root, begun, as_json)
            if begun is None or not begun.complete:
                code = code or INTERRUPTED
            if not as_json:
                _say_how_far(store, "the next scrub goes on with")
    if code:
        raise typer.Exit(code)


def _code(done: Scrubbed) -> int:
    return output.FAILED if done.removed or done.unreadable else 0


def spell(seconds: float) -> str:
    """A time for people."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _say_what_comes(store: Store, bytes_per_s: int, from_start: bool) -> None:
    """How much the next pass has before it, and for how long: a rate that nobody meant shows itself."""
    under_way = None if from_start else read_scrubs(store.config.root).under_way
    with store.cleaning() as cleaner:
        chunks, nbytes = cleaner.before(under_way.place if under_way else (0, 0))
    typer.echo(
        f"{clean(store.config.root)}: {chunks:,} chunks to read, {size(nbytes)} with their trailers: "
        f"{spell(nbytes / bytes_per_s)} at {bytes_per_s:,} bytes a second (--rate)"
    )


def _say_how_far(store: Store, what: str) -> None:
    """How far the pass is that is under way, if one is."""
    root = store.config.root
    if (under_way := read_scrubs(root).under_way) is None:
        return
    with store.cleaning() as cleaner:
        behind, chunks = cleaner.behind(under_way.place)
    typer.echo(
        f"{clean(root)}: {what} the pass that was begun {moment(under_way.started)}; {behind:,} of {chunks:,} chunks "
        "are behind it"
    )


def _say(root: Path, done: Scrubbed, as_json: bool) -> None:
    if as_json:
        output.print_json(_object(root, done))
        return
    typer.echo(
        f"{clean(root)}: {done.chunks:,} chunks verified, {size(done.nbytes)}; damaged and removed: "
        f"{len(done.removed)}; not readable: {len(done.unreadable)}; changed meanwhile: {done.changed}"
        + (f"; the rest of a pass that was begun {moment(done.started)}" if done.went_on else "")
        + ("" if done.complete else "; interrupted")
    )
    inspect_view.show_findings(output.screen(), [*done.removed, *done.unreadable])


def _object(root: Path, done: Scrubbed) -> dict[str, Any]:
    return {
        "root": str(root),
        "started": done.started,
        "went_on": done.went_on,
        "complete": done.complete,
        "verified": done.chunks,
        "verified_bytes": done.nbytes,
        "changed": done.changed,
        "removed": [finding_object(finding) for finding in done.removed],
        "unreadable": [finding_object(finding) for finding in done.unreadable],
    }
