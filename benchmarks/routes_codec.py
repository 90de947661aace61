"""Size and speed of packed routes, beside general codecs on the same ids in the same run.

Bytes are those of whole blocks, with token ids, validity and checksums, per (token, layer). Speeds
are ratios to zstd-3 of the same routes in one thread: `encode_ratio` and `decode_ratio` to zstd-3
of the ids in the dtype of the file (int16 in the default one), `*_ratio_narrow` to zstd-3 of the
narrowest dtype, which is the harder comparison.
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
TARGETS = {"bytes_ordered": 4.4, "bytes_set": 3.9, "encode_ratio": 0.15, "decode_ratio": 0.05}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT, metavar="FILE.npz")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    args = parser.parse_args()
    if not packed.uses_numba():
        args.repeat = 1  # 10 to 20 seconds a block
    routes, tokens = load(args.file)
    experts = int(routes.max()) + 1
    narrow = np.ascontiguousarray(routes.astype(np.uint8 if experts <= 256 else np.uint16))
    _, n, layers, k = narrow.shape
    rows = narrow.shape[0] * n * layers
    valid = np.ones((n, layers), bool)

    # whole sequences, as many as fit a block
    per_block = max(1, packed.MAX_TOKENS // n)
    parts = [slice(i, i + per_block) for i in range(0, len(narrow), per_block)]

    def encode(order: bool) -> list[bytes]:
        return [
            packed.encode_block(
                narrow[part].reshape(-1, layers, k),
                tokens[part].ravel(),
                np.tile(valid, (len(tokens[part]), 1)),
                num_experts=experts,
                order=order,
            )
            for part in parts
        ]

    blocks = {order: encode(order) for order in (True, False)}
    for order, data in blocks.items():
        decoded = np.concatenate([packed.decode_block(block).ids for block in data])
        want = narrow if order else np.sort(narrow, axis=-1)
        if not np.array_equal(decoded, want.reshape(decoded.shape)):
            raise SystemExit("the round trip is not exact")

    raw = {"file": routes.tobytes(), "narrow": narrow.tobytes()}
    zstd, unzstd = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    small = {name: zstd.compress(data) for name, data in raw.items()}
    times = fastest(
        args.repeat,
        lambda: encode(True),
        lambda: [packed.decode_block(block) for block in blocks[True]],
        lambda: encode(False),
        lambda: [packed.decode_block(block) for block in blocks[False]],
        lambda: zstd.compress(raw["file"]),
        lambda: unzstd.decompress(small["file"]),
        lambda: zstd.compress(raw["narrow"]),
        lambda: unzstd.decompress(small["narrow"]),
    )
    enc, dec, enc_set, dec_set, zc, zd, zc_narrow, zd_narrow = times
    answer = {
        "benchmark": "routes_codec",
        "file": args.file.name,
        "rows": rows,
        "blocks": len(parts),
        "numba": packed.uses_numba(),
        "bytes_ordered": sum(map(len, blocks[True])) / rows,
        "bytes_set": sum(map(len, blocks[False])) / rows,
        "uint8": len(raw["narrow"]) / rows,
        "int16": 2.0 * k,
        "zstd3": len(small["narrow"]) / rows,
        "zstd3_file_dtype": len(small["file"]) / rows,
        "parquet_zstd19": parquet_bytes(narrow) / rows,
        "file_dtype": str(routes.dtype),
        "encode_ratio": zc / enc,
        "decode_ratio": zd / dec,
        "encode_ratio_set": zc / enc_set,
        "decode_ratio_set": zd / dec_set,
        "encode_ratio_narrow": zc_narrow / enc,
        "decode_ratio_narrow": zd_narrow / dec,
        "encode_seconds": enc,
        "decode_seconds": dec,
        "targets": TARGETS,
    }
    below = answer["bytes_ordered"] <= TARGETS["bytes_ordered"]
    below = below and answer["bytes_set"] <= TARGETS["bytes_set"]
    fast = all(answer[name] >= TARGETS[name] for name in ("encode_ratio", "decode_ratio"))
    answer["met"] = below and fast
    if not args.json:
        print(f"{rows} rows (token, layer) of {k} ids in {len(parts)} blocks; bytes per row:")
        for name in ("bytes_ordered", "bytes_set", "int16", "uint8", "zstd3", "parquet_zstd19"):
            print(f"  {name:15} {answer[name]:6.3f}")
        print("speed as a share of zstd-3, encode and decode:")
        print(f"  {answer['file_dtype'] + ' ids':15} {zc / enc:6.3f} {zd / dec:6.3f}")
        print(f"  {'narrow ids':15} {zc_narrow / enc:6.3f} {zd_narrow / dec:6.3f}")
        print(f"  {'set mode':15} {zc / enc_set:6.3f} {zd / dec_set:6.3f}")
        print(f"numba: {'yes' if answer['numba'] else 'no'}")
    print(json.dumps(answer))
    return 0 if answer["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
