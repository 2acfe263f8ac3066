"""`kvxfer quota`: how much of a root each namespace may have, and is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli import output
from kvxfer.cli.arguments import Json, Root, Yes
from kvxfer.cli.output import clean, size
from kvxfer.errors import ConfigError
from kvxfer.store import survey_root
from kvxfer.store.port import find_namespace
from kvxfer.store.root import RootInfo, change_root
from kvxfer.store.shares import MAX_QUOTAS, Quota, quotas_object

EPILOG = (
    "Exit codes: 0 the quotas were shown or changed; 1 declined, or the root is damaged or of another version; 2 a bad "
    "option, no root or no such namespace there, or it cannot be written."
)


def command(
    root: Root,
    namespace: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Whose: how its digest begins (see inspect).")
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(parser=output.nbytes, metavar="SIZE", help="It never has more chunks than these take.")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(parser=output.nbytes, metavar="SIZE", help="Others leave it so much.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Neither, from now on.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show quotas, or set those of one namespace. Servers that have the root open follow within 100 ms.

    A limit that is lower than what the namespace has takes chunks from it when it stores the next one; so it asks.
    """
    with output.errors(as_json, damaged=output.FAILED):
        seen = survey_root(root)
        quotas = dict(seen.info.quotas)
        if namespace is not None:
            view = find_namespace(seen, namespace)
            if clear == (at_most is not None or at_least is not None):
                raise ConfigError("give --at-most, --at-least or both, or else --clear")
            wanted = None if clear else Quota(at_most, at_least or 0)
            what = f"{view.digest.hex()[:12]} in {clean(root)}: {_words(wanted)}"
            output.must_confirm(f"{what}. Go on?", yes, as_json)
            quotas = dict(change_root(root, lambda info: _changed(root, info, view.digest, wanted)).quotas)
        elif clear or at_most is not None or at_least is not None:
            raise ConfigError("--namespace is missing: whose?")
        if as_json:
            output.print_json({"root": str(root), "quotas": quotas_object(quotas)})
            return
        for digest, quota in sorted(quotas.items()):
            typer.echo(f"{digest.hex()[:12]}: {_words(quota)}")
        if not quotas:
            typer.echo("no quotas")


def _words(quota: Quota | None) -> str:
    if quota is None:
        return "no quota"
    most = "no limit" if quota.at_most is None else f"at most {size(quota.at_most)}"
    return f"{most}, others leave it {size(quota.at_least)}"


def _changed(root: Path, info: RootInfo, digest: bytes, wanted: Quota | None) -> RootInfo:
    quotas = {known: quota for known, quota in info.quotas.items() if known != digest}
    if wanted is not None:
        quotas[digest] = wanted
        if wanted.at_most is not None and wanted.at_least > wanted.at_most:
            raise ConfigError(f"at_least={wanted.at_least} is more than at_most={wanted.at_most}")
    room, kept = info.config(root).slab_budget[0], sum(quota.at_least for quota in quotas.values())
    if kept > room or len(quotas) > MAX_QUOTAS:
        raise ConfigError(f"at_least of {len(quotas)} namespaces is {kept} bytes; the root has {room} for slabs")
    return replace(info, quotas=quotas)
