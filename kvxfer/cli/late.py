"""Commands whose modules are imported when they are asked for: all of them take a second of the processor's time."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer.main
from typer.core import TyperCommand, TyperGroup

PACKAGE = __name__.rpartition(".")[0]


class At(NamedTuple):
    """Where a command is, and what `kvxfer --help` says of it."""

    module: str
    help: str  # how its docstring begins
    name: str = "command"  # a function, or a group (typer.Typer)
    epilog: str = "EPILOG"  # a function's


class Late(TyperCommand):
    """A command's name and first words; the command itself takes over where it is run, or its own help is wanted."""

    def __init__(self, name: str, at: At) -> None:
        super().__init__(name, help=at.help)
        self.at = at

    def load(self) -> Any:
        """The command itself, or the group."""
        module = import_module(f"{PACKAGE}.{self.at.module}")
        found = getattr(module, self.at.name)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        alone = typer.Typer(add_completion=False)
        alone.command(name=self.name, epilog=getattr(module, self.at.epilog))(found)
        return typer.main.get_command(alone)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """The command's own, whose command then runs."""
        return self.load().make_context(*args, **extra)


def group(commands: dict[str, At]) -> type[TyperGroup]:
    """What a typer.Typer takes as `cls` to have these commands."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands.update({name: Late(name, at) for name, at in commands.items()})

    return Group
