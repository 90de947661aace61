"""A rollout tape, a replay of it and their diff report, small and with every state in it.

The numbers are made up, the files are real: everything goes through `rolltape.store.TapeWriter`.
Run as a script to get the three folders for looking at by hand: viewer_data.py FOLDER.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.store import Key, Masked, TapeWriter, create_report, create_tape, seal, token_digest
from rolltape.store.codecs import encode_bits, encode_floats
from rolltape.store.schema import TOKEN_STATES
from rolltape.viewer.vocabulary import Vocabulary, load_vocabulary
from tests.e2e import viewer_layers_data as layers_data

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "examples" / "models" / "tiny-moe"

ENGINE_A, ENGINE_B = "1f0c29ab" * 4, "b2d4e6f8" * 4
LAYERS, K, EXPERTS = 6, 4, 16
SEMANTICS = {
    "temperature": 1.0,
    "edits": [],
    "truncation": ["top_k=50"],
    "vocab_size": 4096,
    "dtype": "float32",
    "source": "engine",
}

PROMPT = "Question: a train leaves at 9:40 and needs 75 minutes. When does it arrive?\nAnswer:"
ANSWER = (
    " Let us count. 75 minutes is one hour and 15 minutes.\nFrom 9:40, one hour later is 10:40, "
    "and 15 minutes later it is 10:55.\nSo the train arrives at 10:55.\n"
)
ODD = ' <script>alert("no")</script> <b>bold</b> na\u00efve \U0001f600 \u202edesrever\u200b end.\n'


@dataclass
class Case:
    """One sequence: what both sides recorded."""

    name: str
    group: str
    ids: np.ndarray
    prompt_len: int
    a: Masked
    b: Masked
    mask: np.ndarray
    finish: str = "stop"
    reported: bool = True
    versions: tuple[int, int] = (3, 3)
    routes: np.ndarray | None = None
    live: np.ndarray | None = None
    margin: np.ndarray | None = None
    key_a: Key = field(init=False)
    key_b: Key = field(init=False)

    def __post_init__(self) -> None:
        request, _, sample = self.name.partition(".")
        self.key_a = Key(ENGINE_A, request, int(sample))
        self.key_b = Key(ENGINE_B, request, int(sample))

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Scene:
    """Where the three folders are, and the cases by name."""

    a: Path
    b: Path
    report: Path
    cases: dict[str, Case]

    def id(self, name: str) -> str:
        return self.cases[name].key_a.id


def encode_text(text: str, vocabulary: Vocabulary) -> list[int]:
    """Greedy longest match; not the tokenizer's own split, but the same bytes."""
    by_bytes = {piece: token for token, piece in vocabulary.pieces.items() if token > 1}
    longest = max(len(piece) for piece in by_bytes)
    data, out, at = text.encode(), [], 0
    while at < len(data):
        size = next(n for n in range(longest, 0, -1) if data[at : at + n] in by_bytes)
        out.append(by_bytes[data[at : at + size]])
        at += size
    return out


def make_cases(*, long: int = 6000) -> list[Case]:
    """The sequences. Position 71 of `0-0.1` is the worst one."""
    rng = np.random.default_rng(7)
    vocabulary = load_vocabulary(MODEL)
    prompt = encode_text(PROMPT, vocabulary)
    answer = encode_text(ANSWER, vocabulary)

    def case(name: str, text: list[int], **more: Any) -> Case:
        ids = np.array([*prompt, *text], np.uint32)
        n, start = len(ids), len(prompt)
        a = Masked.empty(n, np.float32)
        a.values[start:] = -rng.gamma(0.6, 1.0, n - start).astype(np.float32)
        a.valid[start:] = True
        b = Masked(a.values.copy(), a.valid.copy())
        noisy = np.flatnonzero(rng.random(n) < 0.5)
        noisy = noisy[noisy >= start]
        size = 10 ** rng.uniform(-6.5, -0.9, len(noisy))
        b.values[noisy] += (size * rng.choice([-1, 1], len(noisy))).astype(np.float32)
        mask = np.zeros(n, bool)
        mask[start:] = True
        return Case(name, more.pop("group"), ids, start, a, b, mask, **more)

    plain = case("0-0.0", answer, group="0-0")
    worst = case("0-0.1", answer + answer, group="0-0", finish="length")
    worst.a.values[71], worst.b.values[71] = np.float32(-2.75), np.float32(-1.4600001)
    same = case("0-0.2", answer, group="0-0")
    same.b.values[:] = same.a.values

    odd = case("0-1.0", encode_text(ODD, vocabulary) + answer, group="0-1")
    n = odd.prompt_len
    odd.a.values[n + 4], odd.b.values[n + 4] = np.nan, -0.5
    odd.b.values[n + 9] = -np.inf
    holes = case("0-1.1", answer, group="0-1")
    n = holes.prompt_len
    holes.a.valid[n + 5 : n + 9] = False
    holes.b.valid[n + 12 : n + 18] = False
    holes.mask[n + 22 : n + 32] = False
    masked = case("0-1.2", answer, group="0-1")
    masked.mask[:] = False

    straddles = case("0-2.0", answer, group="0-2", versions=(3, 4))
    long_one = case("0-2.1", (answer * 200)[:long], group="0-2", finish="length")
    late = long_one.length - 40
    long_one.b.values[late] = long_one.a.values[late] - np.float32(0.75)
    running = case("0-2.2", answer[:20], group="0-2", finish="open", reported=False)
    aborted = case("0-3.0", [], group="0-3", finish="abort")
    cases = [plain, worst, same, odd, holes, masked, straddles, long_one, running, aborted]
    for item in cases:
        _add_routes(item, rng, flips=0.0 if item is same else 0.06)
    return cases


def _add_routes(case: Case, rng: np.random.Generator, *, flips: float) -> None:
    n = max(0, case.length - 1)
    scores = rng.random((n, LAYERS, EXPERTS))
    order = np.argsort(-scores, axis=-1)
    case.routes = order[..., :K].astype(np.uint8)
    case.live = case.routes.copy()
    ranked = np.take_along_axis(scores, order, -1)
    case.margin = (ranked[..., K - 1] - ranked[..., K]).astype(np.float32)
    changed = (rng.random((n, LAYERS)) < flips / LAYERS * np.arange(1, LAYERS + 1)) & (
        case.margin < 0.05
    )
    case.live[..., K - 1][changed] = order[..., K][changed]
    swapped = (rng.random((n, LAYERS)) < 0.02) & ~changed & (flips > 0)
    case.live[swapped] = case.live[swapped][:, [1, 0, 2, 3]]


def build(
    root: Path,
    *,
    cases: list[Case] | None = None,
    model: Path = MODEL,
    sealed: bool = True,
    identity: list[Any] | None = None,
    gaps: int = 0,
) -> Scene:
    """Write tape A, tape B and the report under `root`."""
    cases = make_cases() if cases is None else cases
    a = create_tape(
        root / "a",
        role="rollout",
        provenance={"argv": ["python", "rollout.py"], "git": {"commit": "4be1f20", "dirty": False}},
    )
    uuid_a = _uuid(a, "tape.json")
    b = create_tape(
        root / "b",
        role="trainer",
        parent=uuid_a,
        provenance={"mode": "score", "on": "transformers", "switches": {"routing": "live"}},
    )
    with TapeWriter(a) as writer:
        _write_engine(writer, ENGINE_A, "rollout", model, attention="flash", threads=1)
        _write_side_a(writer, cases)
        for i in range(gaps):
            writer.append(
                "events",
                {
                    "engine": ENGINE_A,
                    "writer": writer.id,
                    "t_ns": 1_700_000_000_000_000_000 + i,
                    "kind": "gap" if i % 2 == 0 else "hook_error",
                    "detail": json.dumps({"table": "routes", "rows": 64, "reason": "queue full"}),
                },
            )
    with TapeWriter(b) as writer:
        _write_engine(writer, ENGINE_B, "trainer", model, attention="sdpa", threads=2)
        _write_side_b(writer, cases)
    if sealed:
        seal(a, status={"exit": 0, "dropped": gaps})
    seal(b, status={"exit": 0})
    report = write_report(root / "report", a, b, cases, identity=identity or [])
    return Scene(a, b, report, {case.name: case for case in cases})


def add_replay(
    scene: Scene,
    name: str,
    cases: list[Case],
    *,
    switches: dict[str, str],
    mode: str = "score",
    threads: int = 2,
) -> Path:
    """Another replay of tape A, and its report beside it (`NAME-report`): side B of the cases."""
    b = create_tape(
        scene.a.parent / name,
        role="trainer",
        parent=_uuid(scene.a, "tape.json"),
        provenance={"mode": mode, "on": "transformers", "switches": switches},
    )
    with TapeWriter(b) as writer:
        _write_engine(writer, ENGINE_B, "trainer", MODEL, attention="sdpa", threads=threads)
        _write_side_b(writer, cases)
    seal(b, status={"replay": "ok"})
    return write_report(scene.a.parent / f"{name}-report", scene.a, b, cases, identity=[])


def _uuid(path: Path, name: str) -> str:
    return str(json.loads((path / name).read_text())["uuid"])


def _write_engine(
    writer: TapeWriter, engine: str, role: str, model: Path, *, attention: str, threads: int
) -> None:
    writer.append(
        "engines",
        {
            "engine": engine,
            "writer": writer.id,
            "role": role,
            "adapter": "transformers",
            "host": "node-17",
            "pid": 4242,
            "started_ns": 1_700_000_000_000_000_000,
            "ranks": json.dumps({"tp": [0, 1]}),
            "model": str(model),
            "model_type": "qwen3_moe",
            "model_fingerprint": "5c9f" * 8,
            "vocab_size": 4096,
            "num_layers": LAYERS,
            "moe_layers": [list(range(LAYERS))],
            "num_experts": EXPERTS,
            "experts_per_token": K,
            "dtype": "bfloat16",
            "device": "cpu",
            "requested": json.dumps({"attention": attention}),
            "effective": json.dumps({"attention": attention, "threads": threads}),
            "versions": json.dumps({"torch": "2.13.0", "transformers": "5.24.0"}),
        },
    )


def _key(key: Key, count: int = 1) -> dict[str, Any]:
    return {
        "engine": [key.engine] * count,
        "request": [key.request] * count,
        "sample": [key.sample] * count,
        "pass": [key.scoring] * count,
    }


def _write_sequence(writer: TapeWriter, case: Case, key: Key, finish: str, **more: Any) -> None:
    base = {
        **_key(key),
        "group": [case.group],
        "turn": [0],
        "prompt_len": [case.prompt_len],
        "sampling": [json.dumps({"temperature": 1.0, "top_k": 50, "max_new_tokens": 256})],
        "opened_ns": [1_700_000_000_000_000_000],
        **more,
    }
    writer.append("sequences", {**base, "finish": ["open"]})
    if finish != "open":
        digest = token_digest(case.prompt_len, case.ids)
        writer.append(
            "sequences",
            {**base, "finish": [finish], "length": [case.length], "digest": [digest]},
        )


def _write_tokens(writer: TapeWriter, case: Case, key: Key, logprob: Masked) -> None:
    writer.append(
        "tokens",
        {
            **_key(key),
            "start": [0],
            "n": [case.length],
            "ids": [case.ids],
            "loss_mask": [case.mask],
            "processed": [logprob],
            "semantics": [SEMANTICS],
        },
    )


def _write_routes(
    writer: TapeWriter, case: Case, key: Key, ids: np.ndarray | None, *, role: str, step: int
) -> None:
    if ids is None or not len(ids):
        return
    valid = np.ones(ids.shape[:2], bool)
    missing = []
    if case.name == "0-1.1":  # two positions that the recorder did not see
        valid[3:5] = False
        missing = [[3, 2, None, "cached"]]
    writer.append(
        "routes",
        {
            **_key(key),
            "start": [0],
            "n": [len(ids)],
            "role": [role],
            "step": [step],
            "weight_version": [case.versions[0]],
            "layers": [list(range(LAYERS))],
            "k": [K],
            "num_experts": [EXPERTS],
            "encoding": ["plain"],
            "ids": [np.ascontiguousarray(ids.transpose(2, 1, 0)).tobytes()],
            "margin": [encode_floats(case.margin)],
            "valid": [encode_bits(valid)],
            "missing": [json.dumps(missing) if missing else None],
        },
    )


def _write_side_a(writer: TapeWriter, cases: list[Case]) -> None:
    """One prefill step for all, then decode steps with the sequences that are still alive."""
    for case in cases:
        _write_sequence(writer, case, case.key_a, case.finish)
        _write_tokens(writer, case, case.key_a, case.a)
        _write_routes(writer, case, case.key_a, case.routes, role="used", step=0)
        _write_support(writer, case)
        layers_data.write_tensors(writer, case.key_a, case.name, case.length, side="a")
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("step", "row", "request", "sample", "start", "n", "kind", "weight_version")
    }
    last = max((case.length - case.prompt_len for case in cases), default=0)
    sizes = []
    for step in range(last):
        alive = [c for c in cases if c.length - c.prompt_len > step]
        sizes.append(len(alive))
        for row, case in enumerate(alive):
            late = step > (case.length - case.prompt_len) // 2
            first = step == 0
            columns["step"].append(step)
            columns["row"].append(row)
            columns["request"].append(case.key_a.request)
            columns["sample"].append(case.key_a.sample)
            columns["start"].append(0 if first else case.prompt_len + step - 1)
            columns["n"].append(case.prompt_len if first else 1)
            columns["kind"].append("prefill" if first else "decode")
            columns["weight_version"].append(case.versions[1] if late else case.versions[0])
    count = len(columns["step"])
    if count:
        writer.append("forwards", {"engine": [ENGINE_A] * count, "pass": [0] * count, **columns})
        writer.append(
            "steps",
            {
                "engine": [ENGINE_A] * last,
                "step": list(range(last)),
                "kind": ["prefill", *["decode"] * (last - 1)],
                "rows": sizes,
                "attention": ["sdpa"] * last,
                "experts": ["grouped_mm"] * last,
                "cache": ["DynamicCache"] * last,
            },
        )


def _write_support(writer: TapeWriter, case: Case) -> None:
    if case.name != "0-0.1":
        return
    state = np.full(case.length, 2, np.uint8)
    state[case.prompt_len :] = 1
    state[-1] = 0
    counts = np.where(state == 1, 50, 0).astype(np.int32)
    kept = [np.unique(np.append(np.arange(100, 149), token)) for token in case.ids[state == 1]]
    counts[state == 1] = [len(k) for k in kept]
    writer.append(
        "supports",
        {
            **_key(case.key_a),
            "start": [0],
            "n": [case.length],
            "derived": [False],
            "state": [state],
            "counts": [counts],
            "ids": [np.concatenate(kept).astype(np.uint32)],
        },
    )


def _write_side_b(writer: TapeWriter, cases: list[Case]) -> None:
    for step, case in enumerate(c for c in cases if c.reported and c.length > c.prompt_len):
        _write_sequence(writer, case, case.key_b, "scored", origin=[case.key_a.text])
        _write_tokens(writer, case, case.key_b, case.b)
        _write_routes(writer, case, case.key_b, case.live, role="used", step=step)
        layers_data.write_tensors(writer, case.key_b, case.name, case.length, side="b")
        writer.append(
            "forwards",
            {
                "engine": ENGINE_B,
                "step": [step],
                "row": 0,
                "request": case.key_b.request,
                "sample": case.key_b.sample,
                "pass": 0,
                "start": 0,
                "n": case.length - 1,
                "kind": "score",
                "weight_version": 3,
            },
        )


def diff_case(case: Case) -> dict[str, Any]:
    """Per-token states and deltas of one case, as `rolltape diff` defines them."""
    code = {name: i for i, name in enumerate(TOKEN_STATES)}
    state = np.full(case.length, code["compared"], np.uint8)
    delta = np.zeros(case.length, np.float32)
    with np.errstate(invalid="ignore"):
        delta[:] = case.b.values - case.a.values
    state[~np.isfinite(case.a.values) | ~np.isfinite(case.b.values)] = code["non_finite"]
    state[~case.b.valid] = code["missing_b"]
    state[~case.a.valid] = code["missing_a"]
    state[~case.mask] = code["masked"]
    state[: case.prompt_len] = code["not_scored"]
    flips = Masked.empty(case.length, np.int32)
    if case.routes is not None and case.live is not None and len(case.routes):
        other = np.sort(case.routes, -1) != np.sort(case.live, -1)
        flips.values[: len(other)] = other.any(-1).sum(-1)
        flips.valid[: len(other)] = True
        if case.name == "0-1.1":
            flips.valid[3:5] = False
    return {"state": state, "delta": Masked(delta, state == code["compared"]), "flips": flips}


def write_report(path: Path, a: Path, b: Path, cases: list[Case], *, identity: list[Any]) -> Path:
    """The diff report of the two tapes."""
    rows, tokens, deltas = [], [], []
    sites: list[dict[str, Any]] = []
    for case in (c for c in cases if c.reported and c.length > c.prompt_len):
        found = diff_case(case)
        state = [TOKEN_STATES[s] for s in found["state"]]
        delta = found["delta"]
        there = delta.values[delta.valid].astype(np.float64)
        deltas.append(there)
        size = np.where(delta.valid, np.abs(delta.values), -1)
        over = np.flatnonzero(size > 0.1)
        flips = found["flips"]
        rows.append(
            {
                "a": case.key_a.id,
                "b": case.key_b.id,
                "group": case.group,
                "prompt_len": case.prompt_len,
                "length": case.length,
                "finish": case.finish,
                "weight_version": case.versions[1],
                "compared": state.count("compared"),
                "masked": state.count("masked"),
                "missing": state.count("missing_a") + state.count("missing_b"),
                "non_finite": state.count("non_finite"),
                "mean_abs": float(np.abs(there).mean()) if len(there) else None,
                "max_abs": float(np.abs(there).max()) if len(there) else None,
                "max_at": int(size.argmax()) if len(there) else None,
                "k1": float(-there.mean()) if len(there) else None,
                "k3": float((np.exp(there) - 1 - there).mean()) if len(there) else None,
                "first_over": int(over[0]) if len(over) else None,
                "decisions": int(flips.valid.sum()) * LAYERS,
                "disagree": int(flips.values[flips.valid].sum()),
                "tokens_any": int((flips.values[flips.valid] > 0).sum()),
                "routed_tokens": int(flips.valid.sum()),
            }
        )
        tokens.append(
            {
                "a": case.key_a.id,
                "n": case.length,
                "state": found["state"],
                "a_logprob": case.a,
                "b_logprob": case.b,
                "delta": delta,
                "flips": flips,
            }
        )
        errors = layers_data.layer_errors(case.name, case.length)
        sites += layers_data.report_rows(case.key_a.id, errors)
    layers = [_layer(cases, layer) for layer in range(LAYERS)]
    every = np.concatenate(deltas) if deltas else np.zeros(0)
    summary = _summary(a, b, rows, layers, every, identity)
    if sites:
        summary["activations"] = layers_data.summary({c.name: c.key_a.id for c in cases})
        summary["compared"]["activations"] = sum(row["n"] for row in sites)
    report = create_report(path, summary=summary)
    with TapeWriter(report) as writer:
        tables = {"sequences": rows, "tokens": tokens, "routing": layers, "activations": sites}
        for table, content in tables.items():
            if content:
                writer.append(table, {k: [r[k] for r in content] for k in content[0]})
    return report


def _layer(cases: list[Case], layer: int) -> dict[str, Any]:
    decisions = disagree = order = top1 = 0
    margins: list[float] = []
    for case in (c for c in cases if c.reported and c.routes is not None and len(c.routes)):
        ours, theirs = case.routes[:, layer], case.live[:, layer]
        other = (np.sort(ours, -1) != np.sort(theirs, -1)).any(-1)
        decisions += len(ours)
        disagree += int(other.sum())
        order += int(((ours != theirs).any(-1) & ~other).sum())
        top1 += int((ours[:, 0] != theirs[:, 0]).sum())
        margins += case.margin[:, layer][other].tolist()
    return {
        "layer": layer,
        "slice": "all",
        "decisions": decisions,
        "disagree": disagree,
        "order_only": order,
        "top1_disagree": top1,
        "flip_margin_mean": float(np.mean(margins)) if margins else None,
        "flip_margin_max": float(np.max(margins)) if margins else None,
    }


def _summary(
    a: Path,
    b: Path,
    rows: list[dict[str, Any]],
    layers: list[dict[str, Any]],
    deltas: np.ndarray,
    identity: list[Any],
) -> dict[str, Any]:
    size = np.abs(deltas)
    edges = 10.0 ** (np.arange(-18, 5) / 2)
    worst = max(
        (r for r in rows if r["max_abs"] is not None), key=lambda r: r["max_abs"], default=None
    )
    ratio = np.exp(deltas)

    def total(name: str) -> int:
        return int(sum(r[name] for r in rows))

    verdict = "not-run" if not len(size) else "divergent" if size.any() else "identical"
    return {
        "verdict": verdict,
        "reason": f"different bits in {int((size > 0).sum()):,} logprobs",
        "identity": identity,
        "warnings": [
            {"kind": "open", "message": "1 sequences of a are open and have no partner: 0-2.2"}
        ],
        "a": {"path": str(a), "uuid": _uuid(a, "tape.json"), "role": "rollout"},
        "b": {"path": str(b), "uuid": _uuid(b, "tape.json"), "role": "trainer"},
        "column": "processed",
        "tokens_compared": len(size),
        "mean_abs": float(size.mean()) if len(size) else None,
        "max_abs": worst["max_abs"] if worst else None,
        "max_at": {"sequence": worst["a"], "position": worst["max_at"]} if worst else None,
        "k1": float(-deltas.mean()) if len(size) else None,
        "k3": float((ratio - 1 - deltas).mean()) if len(size) else None,
        "frac_ratio_gt_2": float(((ratio > 2) | (ratio < 0.5)).mean()) if len(size) else None,
        "non_finite": total("non_finite"),
        "routing": {
            "decisions": total("decisions"),
            "disagree": total("disagree"),
            "tokens_any": total("tokens_any"),
            "tokens": total("routed_tokens"),
            "per_layer": layers,
        },
        "compared": {
            "logprobs": len(size),
            "routes": total("decisions"),
            "supports": 0,
            "activations": 0,
        },
        "histogram": {
            "edges": edges.tolist(),
            "counts": np.histogram(size[size > 0], edges)[0].tolist(),
            "bitwise": int((size == 0).sum()),
            "below": 0,
            "above": 0,
        },
    }


if __name__ == "__main__":
    made = build(Path(sys.argv[1]))
    sys.stdout.write(f"{made.a} {made.b} {made.report}\n")
