"""Stands where launch.py has its kernels, and writes down what it would have launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import pytest

from kvxfer.convert import kernels, launch


@dataclass
class Launch:
    """One launch: the kernel's name, its programs, and its arguments by name."""

    kernel: str
    programs: int
    arguments: dict[str, Any]


@dataclass
class Recorder:
    """`recorder.kernels` are the launches in order."""

    launches: list[Launch] = field(default_factory=list)

    def __getattr__(self, kernel: str) -> Any:
        function = getattr(kernels, kernel).fn

        class Grid:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                def call(*args: Any, num_warps: int = 4, **kwargs: Any) -> None:
                    (programs,) = grid
                    bound = signature(function).bind(*args, **kwargs).arguments  # every argument, each once
                    self.launches.append(Launch(kernel, programs, dict(bound) | {"num_warps": num_warps}))

                return call

        return Grid()

    @property
    def moved(self) -> Launch:
        """The one launch but for clearing sums."""
        (one,) = [each for each in self.launches if each.kernel != "clear_sums"]
        return one


def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """From now on nothing is launched, but recorded."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "kernels", recorder)
    return recorder
