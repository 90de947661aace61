#!/usr/bin/env bash
# The main job, end to end, on the bundled model: record a rollout, score it as a trainer would,
# diff, look. Usage: bash examples/demo.sh [FOLDER]; PY names the Python to use.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
OUT=${1:-runs/demo-$(date -u +%Y%m%dT%H%M%SZ)}
MODEL=examples/models/tiny-moe
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error
started=$SECONDS

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
rolltape() {
  printf '$ rolltape %s\n' "$*"
  "$PY" -m rolltape "$@"
}
divergent() { # a diff that finds a difference exits with 1: here that is the point
  local status=0
  rolltape "$@" || status=$?
  [ "$status" -eq 1 ] || { echo "expected a difference, the diff exited with $status" >&2; exit 1; }
}

say "1. Record a BF16 rollout: 32 prompts x 64 tokens, sampled"
rolltape record -o "$OUT/rollout" --layers 4 -- "$PY" examples/rollout_transformers.py \
  --model $MODEL --prompts 32 --max-new-tokens 64 --top-k 50 --top-p 0.95

say "2. Score the same tokens in FP32, as a trainer would: the router chooses for itself"
rolltape replay "$OUT/rollout" -o "$OUT/live" --on transformers --mode score \
  --switch dtype=float32 --switch routing=live --switch support=recorded --layers 4

say "3. The same with the recorded expert ids forced"
rolltape replay "$OUT/rollout" -o "$OUT/ids" --on transformers --mode score \
  --switch dtype=float32 --switch routing=ids --switch support=recorded --layers 4

say "4. How far are they apart, where, and how much of it was routing?"
divergent diff "$OUT/rollout" "$OUT/live" --layers -o "$OUT/live-report"
divergent diff "$OUT/rollout" "$OUT/ids" --layers -o "$OUT/ids-report"
"$PY" - "$OUT" <<'PYTHON'
import sys
from rolltape.store import open_report

k3 = {name: open_report(f"{sys.argv[1]}/{name}-report").summary["k3"] for name in ("live", "ids")}
print(f"\nk3 {k3['live']:.3g} with live routing, {k3['ids']:.3g} with the recorded ids: "
      f"{1 - k3['ids'] / k3['live']:.0%} of it was routing")
PYTHON

say "5. Look at it (the demo took $((SECONDS - started)) s)"
if [ -t 0 ] && [ -z "${CI:-}" ]; then
  rolltape view "$OUT"
else # nobody is there to look: start the viewer, fetch its page, stop
  log=$(mktemp)
  "$PY" -m rolltape view --no-open "$OUT" >"$log" &
  viewer=$!
  trap 'kill -INT $viewer 2>/dev/null || true; rm -f "$log"' EXIT
  address=
  for _ in $(seq 300); do
    address=$(sed -n 's/^rolltape view: \(http[^ ]*\).*/\1/p' "$log")
    [ -z "$address" ] || break
    sleep 0.1
  done
  "$PY" -c 'import sys, urllib.request as r; assert b"rolltape" in r.urlopen(sys.argv[1]).read()' "$address"
  echo "the viewer answered at $address; to look: $PY -m rolltape view $OUT"
fi
