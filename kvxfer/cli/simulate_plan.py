"""What `kvxfer simulate` is asked to do, checked before the trace is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvxfer.admission import dwpd_to_bytes_per_s, dwpd_to_endurance_bytes, usual_burst
from kvxfer.errors import ConfigError
from kvxfer.geometry import ITEMSIZES, PRESETS, Kind, KVGeometry
from kvxfer.hf_config import geometries_from_hf_config
from kvxfer.policy import POLICIES
from kvxfer.simulate import BLOCK_TOKENS, Setup, Survey

ADMISSIONS = ("always", "second-touch")
MOST_NAMES = 1 << 28
MOST_RUNS = 500
MOST_BYTES = 1 << 60
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def parse_bytes(option: str, text: str) -> int:
    """Bytes of "100GiB", "100G" (both powers of 1024), "3.84TB" (powers of 1000, as drives are sold), "512".

    Raises:
        ConfigError: it is none, or not in 1..2**60.
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*(?:([KMGTP])(iB|B)?|B)?", text.strip(), re.IGNORECASE)
    if found is not None:
        letter = (found[2] or "").upper()
        unit = _DECIMAL[letter] if letter and (found[3] or "").upper() == "B" else _UNITS[letter]
        if 1 <= (value := round(float(found[1]) * unit)) <= MOST_BYTES:
            return value
    raise ConfigError(f"{option} {text!r}: allowed are sizes as 100GiB (or 100G, the same), 3.84TB, 512, up to 2**60")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a store may hold."""

    text: str
    num_bytes: int = 0
    percent: float = 0.0  # or: of the trace's footprint

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Of "100GiB" or "5%"."""
        text = text.strip()
        if not text.endswith("%"):
            return cls(text, num_bytes=parse_bytes("--capacity", text))
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text[:-1].strip()) or not float(text[:-1]):
            raise ConfigError(f"--capacity {text!r}: allowed are shares of the footprint as 5% or 0.5%, above 0")
        return cls(text, percent=float(text[:-1]))

    def blocks(self, survey: Survey, block_bytes: int) -> int:
        """How many whole blocks that is.

        Raises:
            ConfigError: none.
        """
        blocks = self.num_bytes // block_bytes
        if self.percent:
            blocks = min(int(survey.distinct_blocks * self.percent / 100), MOST_BYTES // block_bytes)
        if blocks < 1:
            raise ConfigError(
                f"--capacity {self.text} holds no block: one takes {block_bytes} bytes, and the trace has "
                f"{survey.distinct_blocks} different ones"
            )
        return blocks


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be written."""

    text: str
    bytes_per_s: float = 0.0  # 0: as much as there is

    @classmethod
    def parse(cls, text: str, drive_bytes: int) -> Budget:
        """Of "none", "50MB/s" or "1dwpd"."""
        text = text.strip()
        if text == "none":
            return cls(text)
        if found := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*dwpd", text, re.IGNORECASE):
            if not drive_bytes:
                raise ConfigError(f"--budget {text}: drive-writes-per-day need --drive SIZE")
            rate = dwpd_to_bytes_per_s(float(found[1]), drive_bytes)
        else:
            rate = float(parse_bytes("--budget", text.removesuffix("/s")))
        if not rate > 0:
            raise ConfigError(f"--budget {text}: allowed are none, bytes a second as 50MB/s, and as 1dwpd, above 0")
        return cls(text, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """What is written to, as far as it is known."""

    num_bytes: int = 0  # 0: not said
    endurance_bytes: float = 0.0  # 0: not said
    write_amplification: float = 1.0  # bytes that reach the flash, for each that is written

    @classmethod
    def parse(
        cls, size: str | None, tbw: float | None, dwpd: float | None, years: float, amplification: float
    ) -> Drive:
        """Of --drive, --tbw, --dwpd, --warranty-years and --write-amplification."""
        for option, value, least in (
            ("--tbw", tbw, 0), ("--dwpd", dwpd, 0), ("--warranty-years", years, 0),
            ("--write-amplification", amplification, 1),
        ):  # fmt: skip
            if value is not None and not (math.isfinite(value) and least <= value <= 1e9 and value > 0):
                raise ConfigError(f"{option} {value}: allowed are numbers above 0 (amplification: from 1) up to 1e9")
        num_bytes = 0 if size is None else parse_bytes("--drive", size)
        if tbw is not None and dwpd is not None:
            raise ConfigError("--tbw and --dwpd are two names of one rating: give one of them")
        if dwpd is not None and not num_bytes:
            raise ConfigError("--dwpd needs --drive SIZE")
        endurance = 0.0 if tbw is None else tbw * 1e12
        if dwpd is not None:
            endurance = dwpd_to_endurance_bytes(dwpd, num_bytes, years)
        return cls(num_bytes=num_bytes, endurance_bytes=endurance, write_amplification=amplification)


def block_bytes_of(model: str, dtype: str | None, bytes_per_token: int | None, block_tokens: int) -> int:
    """Bytes of one whole block.

    Args:
        model: a preset, or a config.json or the directory it lies in.
        dtype: of the cache; None: the model's.
        bytes_per_token: goes before the model.

    Raises:
        ConfigError, LayoutError: no such model, or one whose cache no single number describes.
    """
    if not 1 <= block_tokens <= 1 << 20:
        raise ConfigError(f"--block-tokens {block_tokens}: allowed are 1 to {1 << 20}")
    if bytes_per_token is not None:
        if not 1 <= bytes_per_token <= 1 << 32:
            raise ConfigError(f"--bytes-per-token {bytes_per_token}: allowed are 1 to {1 << 32}")
        return bytes_per_token * block_tokens
    if dtype is not None and dtype not in ITEMSIZES:
        raise ConfigError(f"--dtype {dtype!r}: allowed are {', '.join(ITEMSIZES)}")
    if model in PRESETS:
        groups: tuple[KVGeometry, ...] = (PRESETS[model],)
    elif Path(model).exists():
        groups = geometries_from_hf_config(model, tokens_per_block=1, dtype=dtype)
    else:
        raise ConfigError(f"--model {model!r}: neither a file nor one of {', '.join(PRESETS)}")
    if len(groups) != 1 or groups[0].kind not in (Kind.ATTENTION, Kind.MLA):
        raise ConfigError(f"--model {model}: its layers keep different things; say --bytes-per-token")
    return replace(groups[0], dtype=dtype or groups[0].dtype, tokens_per_block=block_tokens).block_bytes


def _listed(texts: Iterable[str]) -> list[str]:
    """The values of an option that may be repeated and hold several, each once."""
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))


def _known(option: str, texts: Iterable[str], allowed: Iterable[str]) -> tuple[str, ...]:
    allowed = tuple(allowed)
    for text in (found := _listed(texts)):
        if text not in allowed:
            raise ConfigError(f"{option} {text!r}: allowed are {', '.join(allowed)}")
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One setup, and what it was called."""

    setup: Setup
    capacity: Capacity
    admission: str
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every policy with every capacity, admission and budget.

    Raises:
        ConfigError: a value that cannot work.
    """

    trace: Path
    policies: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    admissions: tuple[str, ...]
    budgets: tuple[Budget, ...]
    block_bytes: int
    block_tokens: int = BLOCK_TOKENS
    second_touch_names: int = 1 << 20  # as EngineConfig's, where the admission is second-touch
    drive: Drive = Drive()

    def __post_init__(self) -> None:
        if not 1 <= self.second_touch_names <= MOST_NAMES:
            raise ConfigError(f"--second-touch-names {self.second_touch_names}: allowed are 1 to {MOST_NAMES}")
        for budget in self.budgets:
            if budget.bytes_per_s and self.block_bytes > usual_burst(budget.bytes_per_s):
                raise ConfigError(f"--budget {budget.text} never pays for a block of {self.block_bytes} bytes")

    @classmethod
    def parse(
        cls,
        *,
        policy: Iterable[str],
        capacity: Iterable[str],
        admission: Iterable[str],
        budget: Iterable[str],
        drive: Drive,
        **rest: Any,
    ) -> Plan:
        """Of the options' texts.

        Raises:
            ConfigError: a value that cannot work; names the option and what is allowed.
        """
        of_budget: Callable[[str], Budget] = lambda text: Budget.parse(text, drive.num_bytes)  # noqa: E731
        plan = cls(
            policies=tuple(POLICIES) if "all" in (listed := _listed(policy)) else _known("--policy", listed, POLICIES),
            capacities=tuple(map(Capacity.parse, _listed(capacity))),
            admissions=_known("--admission", admission, ADMISSIONS),
            budgets=tuple(map(of_budget, _listed(budget))),
            drive=drive,
            **rest,
        )
        runs = len(plan.policies) * len(plan.capacities) * len(plan.admissions) * len(plan.budgets)
        if runs > MOST_RUNS:
            raise ConfigError(f"{runs} combinations of the options: allowed are {MOST_RUNS}")
        return plan

    def runs(self, survey: Survey) -> list[Run]:
        """What is to be simulated, now that the footprint is known.

        Raises:
            ConfigError: a capacity that holds no block.
        """
        runs = []
        for capacity in self.capacities:
            blocks = capacity.blocks(survey, self.block_bytes)
            for admission in self.admissions:
                for budget in self.budgets:
                    burst = usual_burst(budget.bytes_per_s)
                    for policy in self.policies:
                        setup = Setup(
                            policy=policy,
                            capacity_blocks=blocks,
                            block_bytes=self.block_bytes,
                            block_tokens=self.block_tokens,
                            second_touch_names=self.second_touch_names if admission == "second-touch" else 0,
                            bytes_per_s=budget.bytes_per_s,
                            burst_bytes=burst,
                        )
                        runs.append(Run(setup=setup, capacity=capacity, admission=admission, budget=budget))
        return runs
