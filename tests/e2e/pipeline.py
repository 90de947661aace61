"""A run made by the real pipeline, for looking at: recorded, replayed in three ways, compared.

Nothing is made up: the bundled model, `rolltape record`, `replay` and `diff` as a user types them.
Run as a script to get the folder: `python tests/e2e/pipeline.py FOLDER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "examples" / "models" / "tiny-moe"
_ROLLOUT = REPO / "examples" / "rollout_transformers.py"
_LAYERS = "32"  # every sequence


@dataclass(frozen=True)
class Folders:
    """Where everything is; `folder` holds all of it."""

    folder: Path
    rollout: Path
    live: Path
    ids: Path
    report: Path
    ids_report: Path


def build(folder: Path, *, prompts: int = 32, tokens: int = 64) -> Folders:
    """Record a BF16 rollout, score it in FP32 with its own and with the recorded experts, compare.

    Raises:
        RuntimeError: a command failed; with what it said.
    """
    made = Folders(
        folder,
        *(folder / name for name in ("rollout", "live", "ids", "live-report", "ids-report")),
    )
    # fmt: off
    rolltape("record", "-o", made.rollout, "--layers", _LAYERS, "--top-logprobs", "8", "--",
             sys.executable, _ROLLOUT, "--model", MODEL, "--prompts", prompts,
             "--max-new-tokens", tokens, "--top-k", "50", "--top-p", "0.95")
    for out, routing in ((made.live, "live"), (made.ids, "ids")):
        rolltape("replay", made.rollout, "-o", out, "--on", "transformers", "--mode", "score",
                 "--switch", "dtype=float32", "--switch", f"routing={routing}",
                 "--switch", "support=recorded", "--layers", _LAYERS, "--top-logprobs", "8")
    for tape, report in ((made.ids, made.ids_report), (made.live, made.report)):
        rolltape("diff", made.rollout, tape, "--layers", "-o", report, status=1)
    # fmt: on
    return made


def rolltape(*words: object, status: int = 0) -> str:
    """What one command printed.

    Raises:
        RuntimeError: it ended with another status.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "rolltape", *map(str, words)],
        cwd=REPO,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    if done.returncode != status:
        raise RuntimeError(f"rolltape {words[0]} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])).folder)
