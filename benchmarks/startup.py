"""What `rolltape record` adds to the start of every Python process of a job. Target: < 5 ms.

Starts `python -c pass` in alternating pairs, plain and with the import hook, so that a busy machine
slows both sides down alike; reports the median of the differences within pairs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rolltape.recorder.injection import prepended
from rolltape.store import create_tape

TARGET_MS = 5.0


def start_ms(env: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=env, check=True)
    return 1e3 * (time.perf_counter() - begin)


def measure(plain: dict[str, str], hooked: dict[str, str], pairs: int) -> dict[str, float]:
    for env in (plain, hooked, plain, hooked):
        start_ms(env)  # byte code and page cache
    times = []
    for i in range(pairs):
        first = start_ms(plain if i % 2 else hooked)
        second = start_ms(hooked if i % 2 else plain)
        times.append((first, second) if i % 2 else (second, first))
    differences = sorted(b - a for a, b in times)
    return {
        "plain_ms": statistics.median(a for a, _ in times),
        "hooked_ms": statistics.median(b for _, b in times),
        "added_ms": statistics.median(differences),
        "added_p90_ms": differences[int(0.9 * (len(differences) - 1))],
        "ratio": statistics.median(b / a for a, b in times),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLTAPE_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        # the same Python caches byte code in both; ours need not be writable to us
        base["PYTHONPYCACHEPREFIX"] = f"{folder}/pycache"
        tape = create_tape(Path(folder) / "tape", role="rollout")
        (tape / "procs").mkdir()
        path = {**base, "PYTHONPATH": prepended(None)}
        recorded = {**path, "ROLLTAPE_TAPE": str(tape)}
        results = {
            "recorded": measure(base, recorded, args.pairs),
            "switched_off": measure(base, path, args.pairs),
        }
    good = results["recorded"]["added_ms"] < TARGET_MS
    for name, result in results.items() if not args.json else ():
        print(
            f"{name:13} {result['added_ms']:+.2f} ms (p90 {result['added_p90_ms']:+.2f}) "
            f"on {result['plain_ms']:.1f} ms, ratio {result['ratio']:.3f}"
        )
    answer = {"benchmark": "startup", "pairs": args.pairs, "target_ms": TARGET_MS, "met": good}
    print(json.dumps({**answer, **results}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
