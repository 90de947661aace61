"""Size and speed of packed routes, beside general codecs on the same ids in the same run.

Sizes are bytes per (token, layer). `bytes_ordered` and `bytes_set` count whole blocks, with token
ids, validity and checksums; the peers count the ids alone.

`encode_ratio` and `decode_ratio` are speeds as a share of zstd-3 in one thread on the same bytes:
the ids in their narrowest dtype (uint8 up to 256 experts, else uint16). Ours uses one thread per
processor, as it does by default; `threads` says how many those were, and `*_one_thread` is the
ratio with one. `*_file_dtype` compares with zstd-3 of the ids in the dtype of the file (int16 in
the default one), which is the easier comparison, with all threads.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rolltape.store import packed

DEFAULT = Path(__file__).parent / "data" / "moe128-rollout.npz"
TARGETS = {"bytes_ordered": 3.9, "bytes_set": 3.2, "encode_ratio": 0.15, "decode_ratio": 0.05}


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Routes [sequences, n, layers, k] and token ids uint32 [sequences, n] of the rows."""
    with np.load(path, allow_pickle=False) as file:
        routes = file["route"]
        tokens = np.concatenate([file["prompt"], file["toks"]], axis=1)
    return routes, tokens[:, : routes.shape[1]].astype(np.uint32)


def fastest(repeat: int, *calls: Callable[[], object]) -> list[float]:
    """Shortest of `repeat` times of each call, in turns, so that a busy machine slows all alike."""
    best = [float("inf")] * len(calls)
    for _ in range(repeat):
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def parquet_bytes(ids: np.ndarray) -> int:
    """Parquet, zstd-19, a fixed-size list of k ids a row."""
    values = pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), ids.shape[-1])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"ids": values}), sink, compression="zstd", compression_level=19)
    return int(sink.getvalue().size)


def sorted_by_token(ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows in the order of their token ids, equal ones as they were: [layers, n, k]."""
    rows = ids.reshape(-1, *ids.shape[-2:])[np.argsort(tokens.ravel(), kind="stable")]
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def encode(
    ids: np.ndarray, tokens: np.ndarray, experts: int, *, order: bool, threads: int | None = None
) -> list[bytes]:
    """Blocks of whole sequences, as many as fit one.

    Args:
        ids: [sequences, n, layers, k].
        tokens: uint32 [sequences, n].
        experts: per layer.
        order: keep the slot order.
        threads: of the codec; None is its default.
    """
    _, n, layers, k = ids.shape
    per_block = max(1, packed.block_tokens(layers, k) // n)
    blocks = []
    for i in range(0, len(ids), per_block):
        part = ids[i : i + per_block]
        rows = part.reshape(-1, layers, k)
        valid = np.ones(rows.shape[:2], bool)
        blocks.append(
            packed.encode_block(
                rows,
                tokens[i : i + per_block].ravel(),
                valid,
                num_experts=experts,
                order=order,
                threads=threads,
            )
        )
    return blocks


def decode(blocks: list[bytes], *, threads: int | None = None) -> list[np.ndarray]:
    """Ids [tokens, layers, k] of each block."""
    return [packed.decode_block(data, threads=threads).ids for data in blocks]


def stored_bytes(blocks: list[bytes]) -> int:
    """What the routes take: whole blocks."""
    return sum(map(len, blocks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT, metavar="FILE.npz")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    if not packed.uses_numba():
        args.repeat = 1  # seconds a block
    routes, tokens = load(args.file)
    experts = int(routes.max()) + 1
    narrow = np.ascontiguousarray(routes.astype(np.uint8 if experts <= 256 else np.uint16))
    layers, k = narrow.shape[2:]
    rows = narrow.size // k

    blocks = {order: encode(narrow, tokens, experts, order=order) for order in (True, False)}
    for order, data in blocks.items():
        want = narrow if order else np.sort(narrow, axis=-1)
        if not np.array_equal(np.concatenate(decode(data)), want.reshape(-1, layers, k)):
            raise SystemExit("the round trip is not exact")

    raw = {"file": routes.tobytes(), "narrow": narrow.tobytes()}
    zstd, unzstd = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    small = {name: zstd.compress(data) for name, data in raw.items()}
    calls: dict[str, Callable[[], object]] = {
        "zstd": lambda: zstd.compress(raw["narrow"]),
        "unzstd": lambda: unzstd.decompress(small["narrow"]),
        "zstd_file": lambda: zstd.compress(raw["file"]),
        "unzstd_file": lambda: unzstd.decompress(small["file"]),
        "encode": lambda: encode(narrow, tokens, experts, order=True),
        "decode": lambda: decode(blocks[True]),
        "encode_1": lambda: encode(narrow, tokens, experts, order=True, threads=1),
        "decode_1": lambda: decode(blocks[True], threads=1),
        "encode_set": lambda: encode(narrow, tokens, experts, order=False),
        "decode_set": lambda: decode(blocks[False]),
    }
    t = dict(zip(calls, fastest(args.repeat, *calls.values()), strict=True))
    answer = {
        "benchmark": "routes_codec",
        "file": args.file.name,
        "rows": rows,
        "blocks": len(blocks[True]),
        "numba": packed.uses_numba(),
        "threads": packed.default_threads(layers),
        "bytes_ordered": stored_bytes(blocks[True]) / rows,
        "bytes_set": stored_bytes(blocks[False]) / rows,
        "int16": 2.0 * k,
        "narrow": len(raw["narrow"]) / rows,
        "zstd3": len(small["narrow"]) / rows,
        "zstd3_token_sorted": len(zstd.compress(sorted_by_token(narrow, tokens).tobytes())) / rows,
        "zstd3_file_dtype": len(small["file"]) / rows,
        "parquet_zstd19": parquet_bytes(narrow) / rows,
        "narrow_dtype": str(narrow.dtype),
        "file_dtype": str(routes.dtype),
        "encode_ratio": t["zstd"] / t["encode"],
        "decode_ratio": t["unzstd"] / t["decode"],
        "encode_ratio_one_thread": t["zstd"] / t["encode_1"],
        "decode_ratio_one_thread": t["unzstd"] / t["decode_1"],
        "encode_ratio_file_dtype": t["zstd_file"] / t["encode"],
        "decode_ratio_file_dtype": t["unzstd_file"] / t["decode"],
        "encode_ratio_set": t["zstd"] / t["encode_set"],
        "decode_ratio_set": t["unzstd"] / t["decode_set"],
        "seconds": t,
        "targets": TARGETS,
    }
    answer["met"] = all(
        answer[name] <= limit if name.startswith("bytes") else answer[name] >= limit
        for name, limit in TARGETS.items()
    )
    if not args.json:
        print(f"{rows} rows (token, layer) of {k} ids in {answer['blocks']} blocks; bytes per row:")
        for name in (
            "bytes_ordered",
            "bytes_set",
            "int16",
            "narrow",
            "zstd3",
            "zstd3_token_sorted",
            "parquet_zstd19",
        ):
            print(f"  {name:18} {answer[name]:6.3f}")
        print(f"speed as a share of zstd-3 of the {narrow.dtype} ids, encode and decode:")
        for name, label in (
            ("", f"{answer['threads']} threads"),
            ("_one_thread", "1 thread"),
            ("_set", "sets"),
            ("_file_dtype", f"to {routes.dtype}"),
        ):
            enc, dec = answer["encode_ratio" + name], answer["decode_ratio" + name]
            print(f"  {label:18} {enc:6.3f} {dec:6.3f}")
        print(f"numba: {'yes' if answer['numba'] else 'no'}")
    print(json.dumps(answer))
    return 0 if answer["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
