"""What a sequence has of routes on both sides, and why they cannot be compared if they cannot."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from rolltape.store.sequences import Sequence
from rolltape.viewer.heat import extent
from rolltape.viewer.library import Pair
from rolltape.viewer.recorded import recorded

_COLUMNS = ("start", "n", "role", "layers", "k", "num_experts")


def routes_info(pair: Pair, name: str) -> dict[str, Any]:
    """Answer of `GET .../seqs/{seq}/routes`.

    Returns:
        `a` and `b`: None where a side is not there, else its `roles`, `layers`, `k`,
        `num_experts` and `positions` up to which something was recorded; `comparable`; `notices`.

    Raises:
        Problem: 404, no such sequence.
    """
    n, prompt_len = extent(pair, name)
    sides = [_side(s) for s in (pair.find(name), pair.partner(name))]
    notices = list(_notices(pair, name, *sides))
    a, b = sides
    there = bool(a and b and a["layers"] and b["layers"])
    return {
        "n": n,
        "prompt_len": prompt_len,
        "a": a,
        "b": b,
        "comparable": there and not any(x["level"] == "warn" for x in notices),
        "notices": notices,
    }


def _side(sequence: Sequence | None) -> dict[str, Any] | None:
    if sequence is None:
        return None
    rows = list(recorded(sequence, "routes", _COLUMNS))
    moe = sequence.tape.engine(sequence.key.engine).get("moe_layers")
    return {
        "roles": sorted({row["role"] for row in rows}),
        "layers": sorted({layer for row in rows for layer in row["layers"]}),
        "k": rows[0]["k"] if rows else None,
        "num_experts": rows[0]["num_experts"] if rows else None,
        "positions": max((row["start"] + row["n"] for row in rows), default=0),
        "dense": moe is not None and len(moe) == 0,
    }


def _notices(
    pair: Pair, name: str, a: dict[str, Any] | None, b: dict[str, Any] | None
) -> Iterable[dict[str, Any]]:
    path = str(pair.tape.path) if pair.tape is not None else str(pair.side("a").get("path"))
    replay = ["rolltape", "replay", path, "-o", f"{path}.replay"]
    diff = ["rolltape", "diff", path, f"{path}.replay", "-o", f"{path}-report"]
    if a is None:
        text = (
            "Routes come from the tapes, and tape A is not open. Start the viewer with it as well."
        )
        report = [str(pair.report.path)] if pair.report is not None else []
        yield _notice("info", "The tape is not open", text, ["rolltape", "view", path, *report])
        return
    if a["dense"]:
        text = "The model has no experts, so that nothing is routed. Layers and tokens are there."
        yield _notice("info", "A dense model", text)
        return
    if not a["layers"]:
        text = (
            "Side A recorded no routes of this sequence. `rolltape show` says what the tape holds, "
            "and a gap of the recording stands on the overview. A replay records routes of its own."
        )
        yield _notice("info", "No routes were recorded", text, ["rolltape", "show", path], replay)
        return
    if pair.report is None:
        text = "There is no report of this tape, so that nothing is paired. Replay it and compare."
        yield _notice("info", "Nothing to compare with", text, replay, diff)
    elif name not in pair.compared:
        text = "The report has no partner of this sequence; its overview says which were left out."
        yield _notice("info", "Not in the report", text)
    elif b is None:
        other = str(pair.side("b").get("path") or "TAPE_B")
        text = (
            "Routes come from the tapes, and tape B is not open. Start the viewer with it as well."
        )
        command = ["rolltape", "view", path, other, str(pair.report.path)]
        yield _notice("info", "Tape B is not open", text, command)
    elif not b["layers"]:
        why = "is of a dense model" if b["dense"] else "recorded none of this sequence"
        text = f"Side A has routes, side B {why}. A replay records them."
        yield _notice("info", "The other side lacks routes", text, replay, diff)
    elif (a["k"], a["num_experts"]) != (b["k"], b["num_experts"]):
        shapes = " against ".join(f"{s['k']} of {s['num_experts']} experts" for s in (a, b))
        text = f"{shapes}: these are not the same model, and choices cannot be compared."
        yield _notice("warn", "Routes of two kinds", text)
    else:
        for side, found in (("A", a), ("B", b)):
            if "live" in found["roles"]:
                text = (
                    f"Routes were forced on side {side}. What is compared is its own choice "
                    "(role live), which it did not use; what it used (role used) stands in the "
                    "detail of a token."
                )
                yield _notice("info", f"Forced routes on side {side}", text)


def _notice(level: str, title: str, text: str, *commands: list[str]) -> dict[str, Any]:
    lines = [shlex.join(command) for command in commands]
    return {"level": level, "title": title, "text": text, "commands": lines}
