"""Runs seeds of the crash tests again: `python -m tests.crash.replay SEED [SEED ...]`, or `--seeds 0:1000`.

A failing test prints this command with its seed.
"""

import argparse
import sys
import time

from tests.crash.explore import Broken, Effort, Stats, explore


def run(seeds: list[int], lives: int, steps: int, effort: Effort) -> tuple[Stats, list[str]]:
    total, broken = Stats(), []
    for seed in seeds:
        try:
            total.add(explore(seed, lives=lives, steps=steps, effort=effort))
        except Broken as error:
            broken.append(f"seed {seed}: {error}")
    return total, broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.replay", description=__doc__)
    parser.add_argument("seed", nargs="*", type=int)
    parser.add_argument("--seeds", metavar="FROM:TO", help="a range of seeds")
    parser.add_argument("--lives", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--variants", type=int, default=Effort().variants, help="power cuts per disk operation")
    arguments = parser.parse_args()
    seeds = list(arguments.seed)
    if arguments.seeds:
        first, _, last = arguments.seeds.partition(":")
        seeds += range(int(first), int(last))
    if not seeds:
        parser.error("give at least one seed")
    started = time.process_time()
    total, broken = run(seeds, arguments.lives, arguments.steps, Effort(variants=arguments.variants))
    spent = time.process_time() - started
    for line in broken:
        print(line)
    print(
        f"{len(seeds)} seeds, {total.states:,} crash states ({total.nested:,} during a recovery, "
        f"{total.opened:,} distinct disks) in {spent:.1f} s of CPU: {len(broken)} broken"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
