"""`make soak`: the campaign, what memory is kept, and the storm, for SOAK_SECONDS; exit status 1 on any loss.

A quarter of the time is the campaign's, an eighth the memory's, the rest the storm's. The seed that is printed gives
the same choices again; which process is where when it is struck is the machine's. `make campaign` is the campaign
alone, without an end before every call has failed in every way.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.native.shims import compiled, preloaded
from tests.soak import memory
from tests.soak.storm import Storm

ROUND_S = 40.0


def campaign(seed: int, place: str, *words: str) -> tuple[bool, str]:
    """A campaign of random cases in a process without threads; whether it found nothing, and what it has said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.campaign", "--seed", str(seed), "--dir", place, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | preloaded(compiled("lmdb", Path(place))),
    )  # fmt: skip
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line)
    return process.wait() == 0, "".join(said)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS") or 600))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SOAK_SEED") or random.randrange(1 << 30)))
    parser.add_argument("--dir", help="where roots are made; left out: the temporary directory")
    parser.add_argument("--campaign", action="store_true", help="all of the campaign, and nothing else")
    options = parser.parse_args()
    start = time.monotonic()
    if options.campaign:
        with tempfile.TemporaryDirectory(dir=options.dir) as place:
            return 0 if campaign(options.seed, place, "--loud")[0] else 1
    print(f"soak: {options.seconds:g} s, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        good, text = campaign(options.seed, place, "--seconds", str(options.seconds / 4))
        steady, kept = memory.run(options.seconds / 8, place)
        print(kept, flush=True)
        storm = Storm(Path(place, "root"), options.seed)
        while not storm.losses and (
            (left := start + options.seconds - time.monotonic()) > 0 or not storm.counts["rounds"]
        ):
            storm.round(min(ROUND_S, max(1.0, left)))
    counts = storm.counts
    print("storm: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    losses = len(storm.losses) + (not good) + (not steady)
    met = re.search(r"faults (\d+) of (\d+) plays", text)
    faults = counts["faults"] + counts["kills"] + counts["stops"] + (int(met[1]) if met else 0)
    operations = counts["loads"] + counts["saves"] + counts["puts"]
    print(
        f"soak: {time.monotonic() - start:.0f} s, seed {options.seed}: {operations} chunks stored or loaded in storms, "
        f"{met[2] if met else 0} plays, {faults} faults, losses {losses}"
    )
    for loss in storm.losses:
        print(f"LOSS {loss}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
