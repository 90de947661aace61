"""The tables of a tape and of a report: names, columns, Arrow types.

The prose is docs/format.md. Rules that hold for every table:

* position means the 0-based index into prompt + response; one convention for everything;
* missing is null, never 0.0 and never expert 0;
* columns are only ever added; readers ignore columns that they do not know.
"""

from __future__ import annotations

import pyarrow as pa

FORMAT_MAJOR = 1
FORMAT_MINOR = 2

_F32S = pa.list_(pa.field("item", pa.float32()))

#: Key of one scoring of one sequence, see `rolltape.store.keys.Key`.
KEY: tuple[pa.Field, ...] = (
    pa.field("engine", pa.string(), nullable=False),
    pa.field("request", pa.string(), nullable=False),
    pa.field("sample", pa.int32(), nullable=False),
    pa.field("pass", pa.int32(), nullable=False),
)

#: A position range [start, start + n) of one key.
SPAN: tuple[pa.Field, ...] = (
    *KEY,
    pa.field("start", pa.int32(), nullable=False),
    pa.field("n", pa.int32(), nullable=False),
)

#: What a logprob column means. `raw` is (T = 1, full vocabulary, no edits); `scaled` is
#: (temperature, full, edits); `processed` is (temperature, kept vocabulary, edits).
SEMANTICS = pa.struct(
    [
        pa.field("temperature", pa.float64()),  # as applied; null when unknown
        pa.field("edits", pa.list_(pa.string())),  # "repetition_penalty=1.1", in order applied
        pa.field("truncation", pa.list_(pa.string())),  # "top_k=50", in order applied
        pa.field("vocab_size", pa.int32()),  # logits width, padding included
        pa.field("dtype", pa.string()),  # dtype of the log-softmax
        pa.field("source", pa.string()),  # engine | recomputed | derived
    ]
)

#: A fragment of routes as it was recorded, before `compact` joined it with its neighbours.
MERGED = pa.struct(
    [
        pa.field("start", pa.int32()),
        pa.field("n", pa.int32()),
        pa.field("step", pa.int64()),
        pa.field("weight_version", pa.int64()),
    ]
)

TAPE_TABLES: dict[str, pa.Schema] = {
    # A row per process that took part.
    "engines": pa.schema(
        [
            pa.field("engine", pa.string(), nullable=False),
            pa.field("writer", pa.string(), nullable=False),
            pa.field("role", pa.string(), nullable=False),  # rollout|trainer|reference|draft
            pa.field("adapter", pa.string(), nullable=False),
            pa.field("process", pa.string()),  # frontend|core|worker; null: one does it all
            pa.field("host", pa.string()),
            pa.field("pid", pa.int64()),
            pa.field("started_ns", pa.int64()),
            pa.field("replica", pa.int32()),
            pa.field("ranks", pa.string()),  # JSON {"tp": [rank, size], ...}
            pa.field("model", pa.string()),  # path or name as the job gave it
            pa.field("model_type", pa.string()),
            pa.field("model_fingerprint", pa.string()),  # xxh3-128 of the architecture part
            pa.field("vocab_size", pa.int32()),
            pa.field("num_layers", pa.int32()),
            pa.field("moe_layers", pa.list_(pa.int32())),  # [] is dense, null is unknown
            pa.field("num_experts", pa.int32()),
            pa.field("experts_per_token", pa.int32()),
            pa.field("dtype", pa.string()),
            pa.field("device", pa.string()),
            pa.field("requested", pa.string()),  # JSON settings asked for
            pa.field("effective", pa.string()),  # JSON settings in force
            pa.field("versions", pa.string()),  # JSON library versions, GPU, driver
        ]
    ),
    # Appended on start (finish = "open") and again on finish; the last row of a key counts.
    "sequences": pa.schema(
        [
            *KEY,
            pa.field("group", pa.string()),
            pa.field("group_derived", pa.bool_()),
            pa.field("turn", pa.int32()),
            pa.field("continues", pa.string()),
            pa.field("external", pa.string()),  # request id that the caller knows it by
            pa.field("origin", pa.string()),  # carried key of the sequence that is replayed
            pa.field("prompt_len", pa.int32(), nullable=False),
            pa.field("length", pa.int32()),  # prompt + response; null while open
            pa.field("digest", pa.string()),  # of (prompt_len, token ids); null while open
            pa.field("finish", pa.string(), nullable=False),  # stop|length|abort|error|open|scored
            pa.field("sampling", pa.string()),  # JSON, as applied
            pa.field("opened_ns", pa.int64()),
            pa.field("closed_ns", pa.int64()),
        ]
    ),
    "tokens": pa.schema(
        [
            *SPAN,
            pa.field("ids", pa.list_(pa.uint32())),
            pa.field("loss_mask", pa.list_(pa.bool_())),
            pa.field("raw", _F32S),
            pa.field("scaled", _F32S),
            pa.field("processed", _F32S),
            pa.field("semantics", SEMANTICS),
        ]
    ),
    # One engine iteration.
    "steps": pa.schema(
        [
            pa.field("engine", pa.string(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("call", pa.int64()),  # generate() call or scoring batch it belongs to
            pa.field("kind", pa.string()),  # prefill|decode|mixed|score
            pa.field("t_ns", pa.int64()),
            pa.field("rows", pa.int32()),
            pa.field("columns", pa.int32()),  # tokens a row, padding included
            pa.field("tokens", pa.int32()),  # without padding
            pa.field("padded_tokens", pa.int32()),
            pa.field("graph", pa.string()),  # null: eager
            pa.field("attention", pa.string()),
            pa.field("experts", pa.string()),
            pa.field("sdpa", pa.string()),  # backends enabled
            pa.field("cache", pa.string()),
            pa.field("threads", pa.int32()),
        ]
    ),
    # A row per (step, batch row).
    "forwards": pa.schema(
        [
            pa.field("engine", pa.string(), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("row", pa.int32(), nullable=False),
            pa.field("request", pa.string(), nullable=False),
            pa.field("sample", pa.int32(), nullable=False),
            pa.field("pass", pa.int32(), nullable=False),
            pa.field("start", pa.int32(), nullable=False),
            pa.field("n", pa.int32(), nullable=False),
            # prefill | decode | verify | recompute | cached | dummy | score
            pa.field("kind", pa.string(), nullable=False),
            pa.field("pad_left", pa.int32()),
            pa.field("drafted", pa.int32()),
            pa.field("accepted", pa.int32()),
            pa.field("weight_version", pa.int64()),
            pa.field("kv_source", pa.string()),  # own|shared|remote
        ]
    ),
    # `ids` and `weights` are encoded by rolltape.store.codecs.
    "routes": pa.schema(
        [
            *SPAN,
            pa.field("role", pa.string(), nullable=False),  # used | live (when another was forced)
            pa.field("step", pa.int64()),  # first step of the span
            pa.field("weight_version", pa.int64()),
            pa.field("layers", pa.list_(pa.int32()), nullable=False),
            pa.field("k", pa.int32(), nullable=False),
            pa.field("num_experts", pa.int32(), nullable=False),
            pa.field("encoding", pa.string(), nullable=False),
            pa.field("ids", pa.binary()),
            pa.field("weights", pa.binary()),  # float32
            pa.field("margin", pa.binary()),  # float32: k-th minus (k+1)-th choice score
            pa.field("valid", pa.binary()),  # bitmap over [n, layers]; null: all valid
            pa.field("missing", pa.string()),  # JSON [[start, n, layer | null, reason], ...]
            # packed only: the row that holds the block stands `back` rows before this one in the
            # same record batch, and the fragment begins at token `at` of the block
            pa.field("back", pa.int32()),
            pa.field("at", pa.int32()),
            pa.field("merged", pa.list_(MERGED)),  # the recorded fragments that went into this one
        ]
    ),
    # CSR: `counts` and `ids` are used by positions whose state is explicit. With an encoding
    # `ids` is empty and `data` holds them, see rolltape.store.kept.
    "supports": pa.schema(
        [
            *SPAN,
            pa.field("derived", pa.bool_(), nullable=False),
            pa.field("state", pa.list_(pa.uint8()), nullable=False),
            pa.field("counts", pa.list_(pa.int32()), nullable=False),
            pa.field("ids", pa.list_(pa.uint32()), nullable=False),
            pa.field("encoding", pa.string()),  # null: plain, the lists above
            pa.field("data", pa.binary()),
        ]
    ),
    # The k most probable tokens of each position and the mass of all others.
    "distributions": pa.schema(
        [
            *SPAN,
            pa.field("k", pa.int32(), nullable=False),
            pa.field("ids", pa.list_(pa.uint32()), nullable=False),  # [n * k], best first
            pa.field("logprobs", _F32S, nullable=False),  # [n * k]; null: not recorded
            pa.field("tail", _F32S, nullable=False),  # [n] log of the mass outside the k
            pa.field("semantics", SEMANTICS),
        ]
    ),
    "weights": pa.schema(
        [
            pa.field("engine", pa.string(), nullable=False),
            pa.field("version", pa.int64(), nullable=False),
            pa.field("state", pa.string(), nullable=False),  # complete | dirty
            pa.field("t_ns", pa.int64()),
            pa.field("group", pa.string()),  # tensor group; "" is the whole model
            pa.field("digest", pa.uint64()),
            pa.field("tensors", pa.int32()),
            pa.field("elements", pa.int64()),
            pa.field("label", pa.string()),  # the name that the job gives this version
            pa.field("reason", pa.string()),  # why there is no digest, or it cannot be compared
        ]
    ),
    # A row per choice of a kernel, written when it is first seen in a process.
    "tactics": pa.schema(
        [
            pa.field("engine", pa.string(), nullable=False),  # "": no engine in this process
            pa.field("writer", pa.string(), nullable=False),
            pa.field("t_ns", pa.int64(), nullable=False),
            pa.field("tuner", pa.string(), nullable=False),  # flashinfer|tensorrt_llm|triton|...
            pa.field("op", pa.string(), nullable=False),
            pa.field("key", pa.string(), nullable=False),  # JSON: shapes and what else decides
            # chosen | cached | fallback | profiled | observed | unrecorded
            pa.field("source", pa.string(), nullable=False),
            pa.field("implementation", pa.string()),  # runner class, kernel or library name
            pa.field("tactic", pa.string()),  # what the tuner returned, as repr() writes it
            pa.field("graph", pa.string()),  # key of the graph being captured; null: eager
            pa.field("time_ms", pa.float64()),  # as the tuner measured it
            pa.field("fingerprint", pa.string()),  # JSON: device, capability, library versions
            pa.field("reason", pa.string()),  # of an unrecorded choice: why nobody can see it
        ]
    ),
    # Tensors of chosen sites and positions.
    "activations": pa.schema(
        [
            *SPAN,
            pa.field("site", pa.string(), nullable=False),
            pa.field("dtype", pa.string(), nullable=False),  # torch dtype name of the values
            pa.field("width", pa.int32(), nullable=False),
            pa.field("data", pa.binary()),  # float32 [n, width], exact for every float dtype kept
            pa.field("encoding", pa.string()),  # null: the tensor; sketch1: rolltape.store.codecs
        ]
    ),
    "events": pa.schema(
        [
            pa.field("engine", pa.string()),
            pa.field("writer", pa.string(), nullable=False),
            pa.field("t_ns", pa.int64(), nullable=False),
            # gap|hook_error|update|abort|preempt|sleep|wake|finding|notice|replica
            pa.field("kind", pa.string(), nullable=False),
            pa.field("request", pa.string()),
            pa.field("sample", pa.int32()),
            pa.field("start", pa.int32()),
            pa.field("n", pa.int32()),
            pa.field("detail", pa.string()),  # JSON
        ]
    ),
    # Late facts about a sequence: reward, advantage, filtered. The last row of a name counts.
    "annotations": pa.schema(
        [
            *KEY,
            pa.field("name", pa.string(), nullable=False),
            pa.field("number", pa.float64()),
            pa.field("text", pa.string()),
            pa.field("t_ns", pa.int64(), nullable=False),
        ]
    ),
    # Written at seal, a row a sequence, so that nobody has to scan the tape for it.
    "rollups": pa.schema(
        [
            *KEY,
            pa.field("group", pa.string()),
            pa.field("origin", pa.string()),
            pa.field("prompt_len", pa.int32(), nullable=False),
            pa.field("length", pa.int32(), nullable=False),  # tokens known when it was sealed
            pa.field("finish", pa.string(), nullable=False),  # or "unknown": no row in `sequences`
            pa.field("digest", pa.string()),
            pa.field("opened_ns", pa.int64()),
            pa.field("closed_ns", pa.int64()),
            pa.field("loss_tokens", pa.int32(), nullable=False),
            *(
                pa.field(f"{column}_{measure}", type_)
                for column in ("processed", "scaled", "raw")
                for measure, type_ in (
                    ("count", pa.int32()),  # response positions with a value
                    ("non_finite", pa.int32()),
                    ("sum", pa.float64()),  # of the finite ones
                    ("min", pa.float32()),
                    ("min_at", pa.int32()),  # position of the least probable token
                )
            ),
            pa.field("routed", pa.int32(), nullable=False),  # positions with any route used
            pa.field("route_rows", pa.int64(), nullable=False),  # valid (position, layer) pairs
            pa.field("live_rows", pa.int64(), nullable=False),  # of role live
            pa.field("explicit", pa.int32(), nullable=False),  # positions with a kept set
            pa.field("kept_sum", pa.int64(), nullable=False),  # ids in those sets
            pa.field("kept_max", pa.int32(), nullable=False),
            pa.field("version_min", pa.int64()),  # weight versions of its logprobs
            pa.field("version_max", pa.int64()),
            pa.field("gaps", pa.int32(), nullable=False),  # events of kind gap that name it
        ]
    ),
    # Written at seal: which record batches hold rows of which sequence, by table and sequence.
    "offsets": pa.schema(
        [
            pa.field("table", pa.string(), nullable=False),
            pa.field("sequence", pa.int32(), nullable=False),  # row of `rollups`
            pa.field("shard", pa.int32(), nullable=False),  # index into the seal's list
            pa.field("batch", pa.int32(), nullable=False),
            pa.field("rows", pa.int32(), nullable=False),
            pa.field("start", pa.int32(), nullable=False),  # least position of those rows
            pa.field("end", pa.int32(), nullable=False),  # one behind the greatest
            pa.field("first_step", pa.int64()),  # least step of those rows, of `forwards`
            pa.field("last_step", pa.int64()),
        ]
    ),
}

#: Tables that a seal derives from the others; never written by a recorder.
DERIVED_TABLES = ("rollups", "offsets")

#: Tables of a diff report. `a` and `b` are sequence ids of the two tapes.
REPORT_TABLES: dict[str, pa.Schema] = {
    "sequences": pa.schema(
        [
            pa.field("a", pa.string(), nullable=False),
            pa.field("b", pa.string(), nullable=False),
            pa.field("group", pa.string()),
            pa.field("prompt_len", pa.int32()),
            pa.field("length", pa.int32()),
            pa.field("finish", pa.string()),
            pa.field("weight_version", pa.int64()),
            pa.field("compared", pa.int32()),
            pa.field("masked", pa.int32()),
            pa.field("missing", pa.int32()),
            pa.field("non_finite", pa.int32()),
            pa.field("mean_abs", pa.float64()),
            pa.field("max_abs", pa.float64()),
            pa.field("p99_abs", pa.float64()),
            pa.field("max_at", pa.int32()),  # position; null when nothing was compared
            pa.field("k1", pa.float64()),
            pa.field("k3", pa.float64()),
            pa.field("first_over", pa.int32()),  # first position with |d| > 0.1 nat
            pa.field("decisions", pa.int64()),
            pa.field("disagree", pa.int64()),
            pa.field("tokens_any", pa.int64()),
            pa.field("routed_tokens", pa.int64()),
            pa.field("paired_by", pa.string()),  # key | digest
            # Largest |d| of each of at most 32 equal stretches of positions 0..length-1; null in a
            # stretch where nothing was compared.
            pa.field("spark", _F32S),
        ]
    ),
    # Dense per-token answer of one pair, positions 0..n-1.
    "tokens": pa.schema(
        [
            pa.field("a", pa.string(), nullable=False),
            pa.field("n", pa.int32(), nullable=False),
            pa.field("state", pa.list_(pa.uint8())),  # TOKEN_STATES
            pa.field("a_logprob", _F32S),
            pa.field("b_logprob", _F32S),
            pa.field("delta", _F32S),  # b - a, null unless state is compared
            pa.field("flips", pa.list_(pa.int32())),  # MoE layers that disagree; null: no route
            pa.field("ids", pa.list_(pa.uint32())),  # of side A, so that a page reads one row
        ]
    ),
    "routing": pa.schema(
        [
            pa.field("layer", pa.int32(), nullable=False),
            pa.field("slice", pa.string(), nullable=False),  # all | position:0-63 | version:3
            pa.field("decisions", pa.int64()),
            pa.field("disagree", pa.int64()),  # another set of experts
            pa.field("order_only", pa.int64()),  # same set, another slot order
            pa.field("top1_disagree", pa.int64()),  # by combine weight; null without weights
            pa.field("weight_l1", pa.float64()),  # mean over decisions with the same set
            pa.field("flip_margin_mean", pa.float64()),
            pa.field("flip_margin_max", pa.float64()),
            pa.field("agree_margin_mean", pa.float64()),  # of decisions that agree, for contrast
        ]
    ),
    "activations": pa.schema(
        [
            pa.field("a", pa.string(), nullable=False),
            pa.field("site", pa.string(), nullable=False),
            pa.field("start", pa.int32(), nullable=False),
            pa.field("n", pa.int32(), nullable=False),
            pa.field("max_abs", _F32S),
            pa.field("rel_l2", _F32S),
            pa.field("cosine", _F32S),
            pa.field("equal", pa.list_(pa.bool_())),  # bitwise, per position
            pa.field("ulp", pa.list_(pa.int64())),  # largest distance in the row
            pa.field("non_finite", pa.list_(pa.int32())),  # values whose difference is not finite
            pa.field("sketched", pa.bool_()),  # rel_l2 is estimated from sketches
        ]
    ),
}

#: `supports.state` values.
SUPPORT_FULL, SUPPORT_EXPLICIT, SUPPORT_UNRECORDED = 0, 1, 2

#: Report `tokens.state` values.
TOKEN_STATES = ("compared", "masked", "missing_a", "missing_b", "non_finite", "not_scored")
