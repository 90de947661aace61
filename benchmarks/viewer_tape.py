"""A rollout tape, its trainer scoring and their report, as large as the viewer must bear.

`python benchmarks/viewer_tape.py OUT [--tokens 50e6] [--sequences 25000] [--layers 96]
[--dense 200]` writes OUT/a, OUT/b and OUT/report. The numbers are made up, the files are real: they
go through the store's writer, in the batches that a serving engine writes: blocks of 128 steps, in
which two replicas with 256 rows each decode, prefill in chunks, take prompts from the prefix cache,
are preempted, and get new weights. `--dense` sequences have routes of every layer on both sides,
and errors of every layer in the report.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import pyarrow as pa
from viewer_plan import (
    CACHED,
    DECODE,
    ENGINES,
    EXPERTS,
    GROUP,
    KINDS,
    PREFILL,
    RECOMPUTE,
    ROWS,
    T0,
    TRAINER,
    VOCABULARY,
    Forwards,
    K,
    Plan,
    blocks,
    choices,
    logprobs,
    make_plan,
    mixed,
    schedule,
    token_ids,
)
from viewer_report import write_report

from rolltape.store import TapeWriter, create_tape, seal, token_digest
from rolltape.store.codecs import encode_floats, encode_plain
from rolltape.store.columns import make_batch, ragged
from rolltape.store.schema import SEMANTICS, TAPE_TABLES

MEANING = {
    "temperature": 1.0,
    "edits": [],
    "truncation": ["top_p=0.95"],
    "vocab_size": VOCABULARY,
    "dtype": "float32",
}

# -- tape A ---------------------------------------------------------------------------------


class Rollout:
    """Writes what one engine did.

    Args:
        plan: the sequences.
        engine: which.
        path: of the tape.
    """

    def __init__(self, plan: Plan, engine: int, path: Path) -> None:
        self.plan, self.engine, self.name = plan, engine, ENGINES[engine]
        self.requests = pa.array([plan.key(i).request for i in range(len(plan))])
        self.samples = np.arange(len(plan)) % GROUP
        self.time = T0
        self.runs = schedule(plan, engine)
        last = int((self.runs.first + self.runs.steps).max())
        self.updates = np.linspace(0, last, min(100, 2 + last // 600), endpoint=False).astype(int)
        self.writer = TapeWriter(path)

    def write(self) -> None:
        with self.writer:
            self.write_start()
            for low, high, forwards in blocks(self.runs):
                self.write_block(low, high, forwards)
                self.writer.flush()

    def batch(self, table: str, **columns: Any) -> None:
        """One record batch of its own, as a flush leaves it."""
        made = make_batch(table, TAPE_TABLES[table], {"engine": self.name, **columns})
        if made.num_rows:
            self.writer.write_batch(table, made)

    def key(self, sequences: np.ndarray) -> dict[str, Any]:
        requests = self.requests.take(pa.array(sequences))
        return {"request": requests, "sample": self.samples[sequences], "pass": 0}

    def version(self, step: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.updates, step, side="right") - 1

    def write_start(self) -> None:
        for process in ("frontend", "core", "worker"):
            row = engine_row(self.name, self.writer.id, "rollout", self.plan.layers)
            row |= {"adapter": "vllm", "process": process, "replica": self.engine}
            self.writer.append("engines", row)
        shapes = [
            (op, m) for op in ("moe", "attention", "gemm") for m in (1, 8, 64, 128, 256, 2048)
        ]
        self.batch(
            "tactics",
            writer=self.writer.id,
            t_ns=[T0 - 10**9 + i for i in range(len(shapes))],
            tuner="flashinfer",
            op=[op for op, _ in shapes],
            key=[json.dumps({"m": m, "n": 4096}) for _, m in shapes],
            source=["chosen" if m < 2048 else "fallback" for _, m in shapes],
            implementation=[f"{op}_sm90_{m % 3}" for op, m in shapes],
            tactic=[str(m % 7) for _, m in shapes],
            time_ms=[0.01 * (1 + m % 13) for _, m in shapes],
        )

    def write_block(self, low: int, high: int, forwards: Forwards) -> None:
        tokens = self.write_steps(low, high, forwards)
        times = self.time + np.cumsum(20_000_000 + 20_000 * tokens)
        self.write_events(low, high, forwards, times)
        self.write_sequences(low, forwards, times, opened=True)
        self.batch(
            "forwards",
            **self.key(forwards.sequence),
            step=forwards.step,
            row=forwards.row,
            start=forwards.start,
            n=forwards.n,
            kind=pa.array(KINDS).take(pa.array(forwards.kind)),
            weight_version=pa.array(
                self.version(forwards.step), pa.int64(), mask=forwards.kind == CACHED
            ),
            kv_source=pa.array(["own", "shared"]).take(pa.array((forwards.kind == CACHED) * 1)),
        )
        self.write_tokens(forwards)
        self.write_routes(forwards)
        self.write_sequences(low, forwards, times, opened=False)
        self.time = int(times[-1])

    def write_steps(self, low: int, high: int, forwards: Forwards) -> np.ndarray:
        """Also returns the tokens of each step."""
        ran = forwards.kind != CACHED
        at = forwards.step[ran] - low
        count = high - low
        rows = np.bincount(at, minlength=count)
        tokens = np.bincount(at, weights=forwards.n[ran], minlength=count).astype(np.int64)
        plain = np.bincount(at, weights=forwards.kind[ran] == DECODE, minlength=count)
        decode = rows == plain
        size = 8 * -(-tokens // 8)
        self.batch(
            "steps",
            step=np.arange(low, high),
            kind=np.where(decode, "decode", np.where(plain > 0, "mixed", "prefill")).tolist(),
            t_ns=self.time + np.cumsum(20_000_000 + 20_000 * tokens),
            rows=rows,
            tokens=tokens,
            padded_tokens=np.where(decode, size - tokens, 0),
            graph=[f"full:{s}" if d else None for s, d in zip(size, decode, strict=True)],
            attention="FLASH_ATTN",
            experts="FlashInferExperts",
        )
        return tokens

    def write_tokens(self, forwards: Forwards) -> None:
        plan = self.plan
        end = forwards.start + forwards.n
        draws = (forwards.kind == DECODE) | (forwards.kind == RECOMPUTE)
        draws |= (forwards.kind == PREFILL) & (end == plan.prompt[forwards.sequence])
        first = (forwards.start == 0) & (forwards.kind != RECOMPUTE)
        new = np.unique(forwards.sequence[first])
        if len(new):
            n = plan.prompt[new]
            flat = np.concatenate([plan.tokens(i)[: plan.prompt[i]] for i in new])
            self.batch(
                "tokens",
                **self.key(new),
                start=np.zeros(len(new), np.int32),
                n=n,
                ids=ragged(token_ids(flat), n, pa.uint32()),
                loss_mask=ragged(np.zeros(len(flat), bool), n, pa.bool_()),
            )
        sequence, position = forwards.sequence[draws], end[draws]
        order = np.lexsort((position, sequence))
        sequence, position = sequence[order], position[order]
        heads = np.flatnonzero(np.diff(sequence, prepend=-1))
        n = np.diff(np.append(heads, len(sequence)))
        index = plan.offset[sequence] + position
        said = position - plan.prompt[sequence]
        mask = (sequence % 10 != 0) | (said < 50) | (said >= 90)
        self.batch(
            "tokens",
            **self.key(sequence[heads]),
            start=position[heads],
            n=n,
            ids=ragged(token_ids(index), n, pa.uint32()),
            loss_mask=ragged(mask, n, pa.bool_()),
            processed=ragged(logprobs(index)[0], n, pa.float32()),
            semantics=pa.array([{**MEANING, "source": "engine"}] * len(heads), SEMANTICS),
        )

    def write_routes(self, forwards: Forwards) -> None:
        here = self.plan.dense[forwards.sequence] & (forwards.kind != CACHED)
        version = self.version(forwards.step)
        again = forwards.kind == RECOMPUTE
        order = np.lexsort((forwards.start, version, again, forwards.sequence))
        order = order[here[order]]
        if not len(order):
            return
        what = np.stack([forwards.sequence, again, version])[:, order]
        heads = np.flatnonzero(np.any(np.diff(what, axis=1, prepend=-1), axis=0))
        cells = []
        for part in np.split(order, heads[1:]):
            first, last = part[0], part[-1]
            span = np.arange(forwards.start[first], forwards.start[last] + forwards.n[last])
            index = self.plan.offset[forwards.sequence[first]] + span
            made = choices(index, self.plan.layers, sides="a").a
            cells.append((first, len(span), encode_plain(made, EXPERTS)))
        rows = np.array([c[0] for c in cells])
        self.batch(
            "routes",
            **self.key(forwards.sequence[rows]),
            start=forwards.start[rows],
            n=[c[1] for c in cells],
            step=forwards.step[rows],
            weight_version=version[rows],
            ids=[c[2] for c in cells],
            **route_columns(self.plan.layers, len(cells)),
        )

    def write_sequences(
        self, low: int, forwards: Forwards, times: np.ndarray, *, opened: bool
    ) -> None:
        plan = self.plan
        end = forwards.start + forwards.n
        if opened:
            where = (forwards.start == 0) & (forwards.kind != RECOMPUTE)
        else:
            where = (end == plan.length[forwards.sequence] - 1) & (forwards.kind != CACHED)
            where &= plan.finish[forwards.sequence] != 3
        found, at = np.unique(forwards.sequence[where], return_index=True)
        if not len(found):
            return
        when = times[forwards.step[where][at] - low]
        column: dict[str, Any] = {"finish": "open", "opened_ns": when}
        if not opened:
            digest = [token_digest(plan.prompt[i], token_ids(plan.tokens(i))) for i in found]
            finish = [plan.FINISH[plan.finish[i]] for i in found]
            column = {"finish": finish, "closed_ns": when, "digest": digest}
            column["length"] = plan.length[found]
        self.batch(
            "sequences",
            **self.key(found),
            group=[plan.group(i) for i in found],
            turn=0,
            prompt_len=plan.prompt[found],
            sampling=json.dumps({"temperature": 1.0, "top_p": 0.95, "max_tokens": 16_384}),
            **column,
        )

    def write_events(self, low: int, high: int, forwards: Forwards, times: np.ndarray) -> None:
        again = np.flatnonzero(forwards.kind == RECOMPUTE)
        stopped = np.maximum(forwards.step[again] - 20 - low, 0)
        if len(again):
            self.batch(
                "events",
                **{k: v for k, v in self.key(forwards.sequence[again]).items() if k != "pass"},
                writer=self.writer.id,
                t_ns=times[stopped],
                kind="preempt",
                detail="{}",
            )
        for version in np.flatnonzero((self.updates >= low) & (self.updates < high)).tolist():
            when = int(times[self.updates[version] - low])
            detail = json.dumps({"requested": f"step {version}", "version": version})
            self.batch("events", writer=self.writer.id, t_ns=[when], kind="update", detail=detail)
            groups = ["", "embed", *(f"layers.{n}" for n in range(self.plan.layers)), "norm"]
            self.batch(
                "weights",
                version=version,
                state="complete",
                t_ns=when,
                group=groups,
                digest=mixed(np.arange(len(groups)) + 1000 * version, 6),
                tensors=12,
                elements=1 << 20,
                label=f"step {version}",
            )


def route_columns(layers: int, rows: int) -> dict[str, Any]:
    return {
        "role": "used",
        "layers": [np.arange(layers, dtype=np.int32)] * rows,
        "k": K,
        "num_experts": EXPERTS,
        "encoding": "plain",
    }


def engine_row(engine: str, writer: str, role: str, layers: int) -> dict[str, Any]:
    return {
        "engine": engine,
        "writer": writer,
        "role": role,
        "host": "node-17",
        "pid": 4242,
        "started_ns": T0,
        "ranks": json.dumps({"tp": [0, 8]}),
        "model": "moe-96",
        "model_type": "qwen3_moe",
        "model_fingerprint": "5c9f" * 8,
        "vocab_size": VOCABULARY,
        "num_layers": layers,
        "moe_layers": [list(range(layers))],
        "num_experts": EXPERTS,
        "experts_per_token": K,
        "dtype": "bfloat16",
        "device": "cuda",
        "requested": json.dumps({"max_num_seqs": ROWS}),
        "effective": json.dumps({"max_num_seqs": ROWS, "enable_prefix_caching": True}),
        "versions": json.dumps({"torch": "2.13.0", "vllm": "0.32.0"}),
    }


# -- tape B ---------------------------------------------------------------------------------


def write_scoring(plan: Plan, path: Path) -> None:
    """Each sequence scored once, sixteen in a micro-batch."""
    with TapeWriter(path) as writer:
        row = engine_row(TRAINER, writer.id, "trainer", plan.layers)
        writer.append("engines", {**row, "adapter": "transformers"})
        scored = plan.scored()
        for step, some in enumerate(np.split(scored, np.arange(16, len(scored), 16))):
            keys = [plan.key(i, trainer=True) for i in some]
            same: dict[str, Any] = {
                "engine": TRAINER,
                "request": [k.request for k in keys],
                "sample": [k.sample for k in keys],
                "pass": 0,
            }
            length = plan.length[some]
            index = np.concatenate([plan.tokens(i) for i in some])
            ids, b = token_ids(index), logprobs(index)[1]
            places = np.split(ids, np.cumsum(length)[:-1])
            digest = [token_digest(plan.prompt[i], x) for i, x in zip(some, places, strict=True)]
            known = np.concatenate([np.arange(plan.length[i]) >= plan.prompt[i] for i in some])
            offsets = np.append(0, np.cumsum(length)).astype(np.int32)
            values = pa.array(b, pa.float32(), mask=~known)
            when = T0 + 10**13 + step * 10**9
            rows: dict[str, dict[str, Any]] = {
                "sequences": {
                    **same,
                    "group": [plan.group(i) for i in some],
                    "origin": [plan.key(i).text for i in some],
                    "prompt_len": plan.prompt[some],
                    "length": length,
                    "digest": digest,
                    "finish": "scored",
                    "opened_ns": when,
                    "closed_ns": when + 10**8,
                },
                "tokens": {
                    **same,
                    "start": 0,
                    "n": length,
                    "ids": ragged(ids, length, pa.uint32()),
                    "loss_mask": ragged(
                        np.concatenate([plan.mask(i) for i in some]), length, pa.bool_()
                    ),
                    "processed": pa.ListArray.from_arrays(pa.array(offsets), values),
                    "semantics": pa.array(
                        [{**MEANING, "source": "recomputed"}] * len(some), SEMANTICS
                    ),
                },
                "steps": {
                    "engine": TRAINER,
                    "step": [step],
                    "call": step // 64,
                    "kind": "score",
                    "t_ns": when,
                    "rows": len(some),
                    "columns": int(length.max()),
                    "tokens": int(length.sum()),
                },
                "forwards": {
                    **same,
                    "step": step,
                    "row": np.arange(len(some)),
                    "start": 0,
                    "n": length - 1,
                    "kind": "score",
                    "weight_version": step // 64,
                },
            }
            for table, columns in rows.items():
                writer.append(table, columns)
            for i in some[plan.dense[some]]:
                key, n = plan.key(i, trainer=True), int(plan.length[i]) - 1
                made = choices(plan.tokens(i)[:n], plan.layers)
                row = {"engine": TRAINER, "request": key.request, "sample": key.sample, "pass": 0}
                row |= {"start": 0, "n": n, "step": step, "weight_version": step // 64}
                row |= {"ids": [encode_plain(made.b, EXPERTS)]}
                row |= {"margin": [encode_floats(made.margin)]}
                writer.append("routes", {**row, **route_columns(plan.layers, 1)})


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(out: Path, *, tokens: int, sequences: int, layers: int, dense: int) -> dict[str, Any]:
    """Write the three folders; returns what they are and what they took."""
    begin = time.perf_counter()
    plan = make_plan(tokens, sequences, layers, dense)
    a = create_tape(out / "a", role="rollout", provenance={"argv": ["python", "rollout.py"]})
    for engine in range(len(ENGINES)):
        Rollout(plan, engine, a).write()
    seal(a, status={"exit": 0})
    seconds = {"a": time.perf_counter() - begin}
    uuid = str(json.loads((a / "tape.json").read_text())["uuid"])
    provenance = {"mode": "score", "on": "transformers", "switches": {"routing": "live"}}
    b = create_tape(out / "b", role="trainer", parent=uuid, provenance=provenance)
    write_scoring(plan, b)
    seal(b, status={"exit": 0})
    seconds["b"] = time.perf_counter() - begin - seconds["a"]
    write_report(plan, a, b, out / "report")
    total = time.perf_counter() - begin
    return {
        "tokens": int(plan.length.sum()),
        "sequences": len(plan),
        "layers": layers,
        "dense": int(plan.dense.sum()),
        "seconds": round(total, 1),
        "seconds_a": round(seconds["a"], 1),
        "seconds_b": round(seconds["b"], 1),
        "gb": round(sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 1e9, 3),
        "peak_mb": round(peak_mb()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--tokens", type=float, default=50e6)
    parser.add_argument("--sequences", type=int, default=25_000)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--dense", type=int, default=200, help="sequences with layers recorded")
    args = parser.parse_args()
    made = write(
        args.out,
        tokens=int(args.tokens),
        sequences=args.sequences,
        layers=args.layers,
        dense=args.dense,
    )
    print(json.dumps({"benchmark": "viewer_tape", **made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
