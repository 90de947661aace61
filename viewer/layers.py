"""What is known of the layers of one sequence, and why there is nothing where there is nothing."""

from __future__ import annotations

import json
import shlex
from typing import Any

import numpy as np

from rolltape.store.sequences import Sequence, Tape
from rolltape.store.sites import site_order
from rolltape.viewer.answers import Problem
from rolltape.viewer.arrays import encode
from rolltape.viewer.detail import float_text
from rolltape.viewer.front import floor_sample, floor_thresholds
from rolltape.viewer.heat import MAX_CELLS, STATES, SiteRows, extent, site_rows
from rolltape.viewer.library import Pair
from rolltape.viewer.recorded import recorded


def layers(pair: Pair, name: str) -> dict[str, Any]:
    """Answer of `GET .../seqs/{seq}/layers`.

    Returns:
        `sites`: in the order in which they run, with positions compared and, of those, estimated
        from sketches; `lacking`: sites of this sequence that stand in one tape only, or in both
        and not in the report; `report`: what the report says of layers; `notices`.

    Raises:
        Problem: 404, no such sequence.
    """
    n, prompt_len = extent(pair, name)
    rows = site_rows(pair, name, ("sketched",))
    summary = pair.summary.get("activations")
    found = summary if isinstance(summary, dict) else {}
    return {
        "n": n,
        "prompt_len": prompt_len,
        "sites": _sites(rows),
        "states": list(STATES),
        "lacking": lacking(pair, name, rows.sites),
        "report": {
            "open": pair.report is not None,
            "verdict": found.get("verdict"),
            "reason": found.get("reason"),
            "front": found.get("front"),
            "earliest": found.get("earliest"),
            "floor": floor_sample(pair),
            "by_site": floor_thresholds(pair) is not None,
        },
        "notices": [] if rows.sites else [_nothing(pair, name, found)],
    }


def _sites(rows: SiteRows) -> list[dict[str, Any]]:
    out = []
    for site, spans in rows.spans.items():
        total = sum(s.n for s in spans)
        sketched = sum(s.n for s in spans if rows.sketched(s))
        out.append({"site": site, "positions": total, "sketched": sketched})
    return out


def lacking(pair: Pair, name: str, compared: list[str]) -> dict[str, list[str] | None]:
    """Sites that stand in tape A only, in tape B only, or in both and were not compared.

    None where a tape is not open, so that nobody knows.
    """
    a, b = pair.find(name), pair.partner(name)
    if a is None or b is None:
        return {"only_a": None, "only_b": None, "not_compared": None}
    ours, theirs = recorded_sites(a), recorded_sites(b)
    return {
        "only_a": sorted(ours - theirs, key=site_order),
        "only_b": sorted(theirs - ours, key=site_order),
        "not_compared": sorted((ours & theirs) - set(compared), key=site_order),
    }


def recorded_sites(sequence: Sequence) -> set[str]:
    """Sites of which a tape has rows of a sequence; the tensors are not read."""
    return {row["site"] for row in recorded(sequence, "activations", ("site",))}


def _nothing(pair: Pair, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Why the report has no layers of this sequence, and the commands that make some."""
    a, b = _path(pair, "a"), _path(pair, "b")
    out = f"{a}-layers"
    replay = ["rolltape", "replay", a, "-o", f"{a}.layers", "--layers", "16"]
    held = [_holds(t) for t in (pair.tape, pair.b)]
    if pair.report is None:
        title = "No report of this tape is open"
        text = (
            "Layers are compared by a diff. Replay the tape with every layer's output of the first "
            "16 sequences, compare, and open all three."
        )
        commands = [replay, ["rolltape", "diff", a, f"{a}.layers", "--layers", "-o", out]]
    elif found.get("verdict") not in (None, "not-run"):
        title = "No layers of this sequence"
        text = "The report has layers of other sequences. A replay chooses them by name."
        front = found.get("front")
        if isinstance(front, dict) and front.get("sequence"):
            text += f" The front of the report lies in {front['sequence']}."
        commands = [
            [*replay, "--sequences", name],
            ["rolltape", "diff", a, f"{a}.layers", "--layers", "-o", out],
        ]
    elif held == [True, True]:
        title = "Layers were recorded and not compared"
        text = "Both tapes hold activations; this diff did not ask for them."
        commands = [["rolltape", "diff", a, b, "--layers", "-o", out]]
    else:
        title = "No layer data was recorded"
        sides = [s for s, there in zip("AB", held, strict=True) if there is False]
        lack = f" ({' and '.join(sides)} recorded none)" if sides else ""
        reason = found.get("reason")
        text = (
            f"A diff compares layers of tapes that hold them on both sides{lack}"
            f"{f': {reason}' if reason else ''}. Record sketches of every layer, 72 bytes a row, "
            "replay with layers, and compare."
        )
        commands = [
            [
                "rolltape",
                "record",
                "-o",
                f"{a}.new",
                "--sketches",
                "16",
                "--",
                "python",
                "rollout.py",
            ],
            ["rolltape", "replay", f"{a}.new", "-o", f"{a}.layers", "--layers", "16"],
            ["rolltape", "diff", f"{a}.new", f"{a}.layers", "--layers", "-o", out],
        ]
    lines = [shlex.join(command) for command in commands]
    return {"level": "info", "title": title, "text": text, "commands": lines}


def _path(pair: Pair, side: str) -> str:
    tape = pair.tape if side == "a" else pair.b
    return str(
        tape.path if tape is not None else pair.side(side).get("path") or f"TAPE_{side.upper()}"
    )


def _holds(tape: Tape | None) -> bool | None:
    return None if tape is None else bool(tape.files("activations"))


_MEASURES = ("equal", "rel_l2", "max_abs", "cosine", "ulp", "non_finite", "sketched")
#: Bits of the `flags` of `site_values`.
FLAGS = ("there", "equal", "sketched")


def token_layers(pair: Pair, name: str, position: int) -> dict[str, Any]:
    """Every measure of every site at one position.

    Returns:
        `rows`: site, `equal`, `rel_l2`, `max_abs`, `cosine` (text with all digits of a float32),
        `ulp`, `non_finite` and `sketched`; None where there is no number.
    """
    rows = site_rows(pair, name, _MEASURES)
    out = []
    for site in rows.sites:
        for _, got in rows.cells(site, position, position + 1, _MEASURES):
            floats = {
                c: None if np.isnan(got[c][0]) else float_text(got[c][0])
                for c in ("rel_l2", "max_abs", "cosine")
            }
            counts = {c: None if got[c][0] < 0 else int(got[c][0]) for c in ("ulp", "non_finite")}
            flags = {"equal": bool(got["equal"][0]), "sketched": bool(got["sketched"])}
            out.append({"site": site, **floats, **counts, **flags})
    return {"position": position, "rows": out}


def site_values(pair: Pair, name: str, start: int, end: int) -> bytes:
    """Every measure of every site in positions [start, end), with all its digits.

    Returns:
        Safetensors bytes, all [sites, positions]: `rel_l2`, `max_abs`, `cosine` float32 (NaN:
        none), `ulp` and `non_finite` int64 (-1: none), `flags` uint8 (bits named by the metadata
        `flags`). The metadata has `sites`, a JSON list.

    Raises:
        Problem: 413, more than `MAX_CELLS` cells.
    """
    rows = site_rows(pair, name, _MEASURES)
    shape = (len(rows.sites), end - start)
    if shape[0] * shape[1] > MAX_CELLS:
        text = f"{shape[0]} sites at {shape[1]} positions; at most {MAX_CELLS} cells at a time"
        raise Problem(413, "window too large", text, field="end", limit=MAX_CELLS)
    out: dict[str, np.ndarray] = {
        **{c: np.full(shape, np.nan, np.float32) for c in ("rel_l2", "max_abs", "cosine")},
        **{c: np.full(shape, -1, np.int64) for c in ("ulp", "non_finite")},
        "flags": np.zeros(shape, np.uint8),
    }
    for i, site in enumerate(rows.sites):
        for where, got in rows.cells(site, start, end, _MEASURES):
            for measure in out.keys() - {"flags"}:
                out[measure][i, where] = got[measure]
            out["flags"][i, where] = 1 | got["equal"].astype(np.uint8) << 1 | got["sketched"] << 2
    metadata = {"sites": json.dumps(rows.sites), "flags": ",".join(FLAGS)}
    return encode(out, metadata=metadata | {"start": str(start), "end": str(end)})
