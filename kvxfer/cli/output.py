"""What all commands share: how they print, ask and fail."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console

from kvxfer.errors import ConfigError, FormatError, KvxferError

FAILED = 1
BAD_INPUT = 2


def clean(value: object) -> str:
    """Text from a disk or a driver, on one line and without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value))


def size(num_bytes: int) -> str:
    """A size for people."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def screen() -> Console:
    """Standard output, for text that is taken as it is: nothing in it is markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(report: object) -> None:
    """One JSON object on standard output, in ASCII.

    Raises:
        OSError: it could not be written.
    """
    typer.echo(json.dumps(report))
    sys.stdout.flush()


@contextmanager
def errors(as_json: bool, *, damaged: int = BAD_INPUT) -> Iterator[None]:
    """Makes errors on purpose, and those of the system, one line on standard error and an exit code.

    Args:
        as_json: print `{"error": {"type": ..., "message": ...}}` as well.
        damaged: the exit code for a root that is damaged or of another version.
    """
    try:
        yield
    except (KvxferError, OSError) as exc:
        name, message = type(exc).__name__, clean(exc)
        with suppress(OSError):  # where the streams themselves are what failed, the code has to do
            typer.echo(f"kvxfer: {name}: {message}", err=True)
        with suppress(OSError):
            if as_json:
                print_json({"error": {"type": name, "message": message}})
        raise typer.Exit(damaged if isinstance(exc, FormatError) else BAD_INPUT) from None


def check_can_ask(yes: bool) -> None:
    """Raises ConfigError unless `yes` was given or there is a terminal to ask on."""
    if not yes and not sys.stdin.isatty():
        raise ConfigError("this asks before it changes anything, and there is no terminal to ask on: give --yes")


def confirmed(question: str, yes: bool) -> bool:
    """Asks on the terminal, unless `yes`. Whatever is no yes is a no.

    Raises:
        ConfigError: there is no terminal.
    """
    check_can_ask(yes)
    if yes:
        return True
    # Not typer.confirm: it writes to standard output, where a JSON object may be all that is expected.
    typer.echo(f"{clean(question)} [y/N] ", nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def must_confirm(question: str, yes: bool, as_json: bool) -> None:
    """`confirmed`, for a command that ends where the answer is no.

    Raises:
        ConfigError: there is no terminal.
        typer.Exit: nothing is to be changed: FAILED.
    """
    if not confirmed(question, yes):
        if as_json:
            print_json({"error": {"type": "Declined", "message": "nothing was changed"}})
        else:
            typer.echo("nothing was changed", err=True)
        raise typer.Exit(FAILED)


def whole_number(text: str) -> int:
    """An option's number; what takes it bounds it.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: allowed are whole numbers") from None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def duration(text: str) -> float:
    """An option's time in seconds: `90s`, `15m`, `12h`, `7d` or `2w`.

    Raises:
        typer.BadParameter: it is none.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and len(number) <= 9 and unit in _UNITS):
        raise typer.BadParameter(f"{text!r}: allowed are whole numbers and a unit: 90s, 15m, 12h, 7d, 2w")
    return int(number) * _UNITS[unit]


_SIZE = re.compile(r"([0-9]{1,15})(?:([KMGT])(?:iB)?)?")


def nbytes(text: str) -> int:
    """An option's size in bytes: `10G`, `512MiB`, `4096`; units are powers of 1024.

    Raises:
        typer.BadParameter: it is none.
    """
    if (match := _SIZE.fullmatch(text)) is None:
        raise typer.BadParameter(f"{text!r}: allowed are sizes such as 4096, 512M or 10GiB")
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def moment(seconds: int) -> str:
    """A time in seconds since 1970, in words; 0 is "never"."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else "never"


def as_object(value: Any) -> dict[str, Any]:
    """A probe's fields for `--json`."""
    return {"ok": value.ok, "why": value.why, **value.found}
