#!/usr/bin/env bash
# What re-execution and the determinism suite say of vLLM on a GPU, with the tool's own commands.
#     tests/gpu/vllm.sh OUT
# Engines run side by side on the visible GPUs; JSON, JUnit and logs go to OUT. About 4 minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
work=${WORK:-$(mktemp -d)}
model=examples/models/tiny-moe
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=ERROR
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
small=(--set kv_cache_memory_bytes=2000000000 --set gpu_memory_utilization=0.1)
tape() { python -m rolltape "$@"; }
job() {  # NAME COMMAND...: in the background, with a log
    local name=$1 begun=$SECONDS
    shift
    (VLLM_CACHE_ROOT=$work/cache-$name "$@" >"$out/$name.out" 2>"$out/$name.err"
     echo "$name: exit $? after $((SECONDS - begun)) s") &
}

verified() {  # NAME, then options
    tape verify --engine vllm $model --prompts 64 --tokens 64 --json --junit "$out/$1.xml" "${small[@]}" "${@:2}"
}

rollout() {  # record 2 x 64 sequences with graphs, run them again, score them, compare
    tape record -o "$work/a" -- python benchmarks/vllm_job.py --prompts 64 --prompt-tokens 64 \
        --tokens 256 --seconds 0 --workloads logprobs --kv-mb 2000 || return
    cp -r "$work/a" "$work/a2"
    job reexecute tape replay "$work/a" -o "$work/again" --mode re-execute --on vllm --json
    job reexecute-one tape replay "$work/a" -o "$work/one" --mode re-execute --on vllm --switch batch=one --json
    for dtype in model float32; do
        tape replay "$work/a2" -o "$work/live-$dtype" --switch dtype=$dtype
        tape diff "$work/a2" "$work/live-$dtype" --json >"$out/diff-$dtype.json"
    done
    tape replay "$work/a2" -o "$work/ids" --switch routing=ids && tape diff "$work/a2" "$work/ids" --json >"$out/diff-ids.json"
    wait
}

job verify-graphs verified verify-graphs --case batch --case slot --case graphs --case chunked --case prefix-cache
job verify-eager verified verify-eager --case batch --set enforce_eager=true
job rollout rollout
((${TWO:-0})) && job verify-tp verified verify-tp --case tp --set enforce_eager=true
wait
