"""What `import lockstep` costs beyond `import jax`.

    python benchmarks/import_time.py

Each process is new; the three programs take turns, so that a busy machine disturbs
all of them alike. The fastest of the runs counts: noise only ever adds.
"""

import subprocess
import sys

RUNS = 7
LIMIT_S = 0.15

CLOCK = "import time; start = time.perf_counter(); "
STOP = "; print(time.perf_counter() - start)"
EVERY_NAME = "[getattr(lockstep, name) for name in lockstep.__all__]"
PROGRAMS = {
    "import jax": "import jax",
    "import jax, lockstep": "import jax, lockstep",
    "every public name": f"import jax, lockstep; {EVERY_NAME}",
}


def seconds(program: str) -> float:
    command = [sys.executable, "-c", CLOCK + program + STOP]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    best = dict.fromkeys(PROGRAMS, float("inf"))
    for _ in range(RUNS):
        for name, program in PROGRAMS.items():
            best[name] = min(best[name], seconds(program))
    base = best["import jax"]
    for name, took in best.items():
        print(f"{name:<22}{took:7.3f} s   {took - base:+.3f} s")
    extra = best["import jax, lockstep"] - base
    print(f"import lockstep costs {extra:.3f} s beyond jax (limit {LIMIT_S} s)")
    sys.exit(extra > LIMIT_S)


if __name__ == "__main__":
    main()
