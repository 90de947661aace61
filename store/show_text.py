"""Sequences and positions as lines of text: `rolltape show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rolltape.store.errors import UsageError
from rolltape.store.jsonable import jsonable
from rolltape.store.sequences import Sequence, Tape

#: Columns of a line, where it can be helped.
WIDTH = 80


def sequence_row(sequence: Sequence) -> dict[str, Any]:
    """What is said of a sequence in a list."""
    versions = sequence.weight_version
    found = sorted({int(v) for v in versions.values[versions.valid]})
    return {
        "id": sequence.id,
        "key": sequence.key.text,
        "group": sequence.info["group"],
        "external": sequence.info["external"],
        "prompt_len": sequence.prompt_len,
        "length": sequence.length,
        "finish": sequence.finish,
        "origin": sequence.info["origin"],
        "weight_versions": found,
    }


def list_lines(tape: Tape, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The sequences of a tape, a line each."""
    width = max([len(r["id"]) for r in rows] + [8])
    yield f"{'sequence':<{width}} {'finish':<7} {'prompt':>7} {'response':>8} {'version':>8}  group"
    for row in rows:
        yield (
            f"{row['id']:<{width}} {row['finish']:<7} {row['prompt_len']:>7,} "
            f"{max(0, row['length'] - row['prompt_len']):>8,} "
            f"{ranges(row['weight_versions']) or '-':>8}  {row['group'] or '-'}"
        )
    yield f"{len(rows):,} sequences in {tape.place}"


def position_lines(sequence: Sequence, columns: dict[str, Any], routes: str) -> Iterator[str]:
    """A sequence position by position.

    Args:
        sequence: of a tape.
        columns: what `rolltape.store.describe.position_rows` returns of it.
        routes: layers whose experts are shown, `3,7`; `all`, `none`, or `fit` for those that fit
            on a line.

    Raises:
        UsageError: `routes` names a layer that has none.
    """
    lines = _RouteLines(columns["routes"], routes)
    row = sequence_row(sequence)
    yield (
        f"{row['id']}: {row['prompt_len']:,} prompt + "
        f"{max(0, row['length'] - row['prompt_len']):,} response tokens, {row['finish']}"
    )
    if row["external"]:
        yield f"request {row['external']}"
    yield f"group {row['group'] or '-'}, weight version {ranges(row['weight_versions']) or '-'}"
    if row["origin"]:
        yield f"replays {row['origin']}"
    spans = _merged(sequence.semantics)
    for start, end, text in spans[:4]:
        yield f"logprobs {start}:{end}: {text}"
    if len(spans) > 4:
        yield f"logprobs: {len(spans) - 4} more spans, see --json"
    yield from _legend(columns, shown=routes != "none")
    names = [n for n in ("processed", "scaled", "raw") if n in columns]
    head = f"{'pos':>6} {'token':>7} m"
    head += "".join(f" {name:>10}" for name in names)
    yield head + (f" {'kept':>6}" if "support" in columns else "") + f" {'step':>6} {'ver':>3}"
    for i, position in enumerate(columns["position"]):
        line = f"{position:>6} {_cell(columns['token'], i):>7} {_mark(columns['loss_mask'], i)}"
        line += "".join(f" {_float(columns[name], i):>10}" for name in names)
        if "support" in columns:
            kept = columns["support"][i]
            line += f" {'-' if kept is None else kept:>6}"
        yield f"{line} {_cell(columns['step'], i):>6} {_cell(columns['weight_version'], i):>3}"
        yield from lines.at(i)


def _legend(columns: dict[str, Any], *, shown: bool) -> Iterator[str]:
    """What the columns mean that do not say so themselves."""
    kept = "; kept: ids left by truncation" if "support" in columns else ""
    yield f"m: x in the loss, . not{kept}; -: not recorded"
    yield "step, ver: engine step and weight version that the logprob came from"
    if shown and columns["routes"]:
        live = "; live: own choice where another was forced" if "live" in columns["routes"] else ""
        yield f"below a position LAYER:EXPERTS, in slot order{live}"


class _RouteLines:
    """The experts of a position as indented lines.

    Raises:
        UsageError: layers are wanted that have no routes.
    """

    def __init__(self, routes: dict[str, Any], wanted: str) -> None:
        self._routes = routes if wanted != "none" else {}
        self._fit = wanted == "fit"
        self._layers = None if wanted in ("fit", "all", "none") else _layers(routes, wanted)
        #: By role how many layers fit into a line at every position.
        self._most = {role: self._fitting(role) for role in self._routes} if self._fit else {}

    def _fitting(self, role: str) -> int:
        """Layers that fit at every position; all of them, or some with room for a count."""
        width = WIDTH - len(_label(role))
        rows = [self._parts(role, i) for i in range(len(self._routes[role]["ids"]))]
        layers = len(self._routes[role]["layers"])
        if all(len("  ".join(parts)) <= width for parts in rows):
            return layers
        return min(len(wrapped("  ".join(p), width - 14, separator="  ")[0].split()) for p in rows)

    def _parts(self, role: str, index: int) -> list[str]:
        found = self._routes[role]
        return [
            f"{layer}:{','.join(map(str, ids))}" if ids is not None else f"{layer}:-"
            for layer, ids in zip(found["layers"], found["ids"][index], strict=True)
            if self._layers is None or layer in self._layers
        ]

    def at(self, index: int) -> Iterator[str]:
        """Lines of the position with an index."""
        for role in self._routes:
            parts = self._parts(role, index)
            if all(part.endswith(":-") for part in parts):
                continue
            label, most = _label(role), self._most.get(role, len(parts))
            lines = wrapped("  ".join(parts[:most]), WIDTH - len(label), separator="  ")
            if most < len(parts):
                lines[-1] += f"  +{len(parts) - most} layers"
            for line in lines:
                yield label + line


def _label(role: str) -> str:
    return "       " if role == "used" else "  live "


def _layers(routes: dict[str, Any], wanted: str) -> set[int]:
    """The layers that `--routes` names."""
    there = {layer for found in routes.values() for layer in found["layers"]}
    if not there:
        raise UsageError(f"--routes {wanted}: no routes of this sequence are recorded")
    hint = f"routes of layers {ranges(sorted(there))} are there; or all, or none"
    try:
        layers = {int(layer) for layer in wanted.split(",")}
    except ValueError:
        raise UsageError(f"--routes {wanted}: not numbers of layers", hint=hint) from None
    if not layers <= there:
        gone = ", ".join(map(str, sorted(layers - there)))
        raise UsageError(f"--routes {wanted}: no routes of layer {gone}", hint=hint)
    return layers


def _merged(semantics: list[tuple[int, int, dict[str, Any]]]) -> list[tuple[int, int, str]]:
    """(start, end, text) with neighbours that mean the same in one."""
    out: list[tuple[int, int, str]] = []
    for start, n, meaning in semantics:
        text = _meaning(meaning)
        if out and out[-1][1] == start and out[-1][2] == text:
            out[-1] = out[-1][0], start + n, text
        else:
            out.append((start, start + n, text))
    return out


def _meaning(meaning: dict[str, Any]) -> str:
    temperature = meaning["temperature"]
    parts = [f"T={'unknown' if temperature is None else format(temperature, 'g')}"]
    for name in ("edits", "truncation"):
        parts += [f"{name} unknown"] if meaning[name] is None else meaning[name]
    parts += [f"{meaning['vocab_size']} logits"] if meaning["vocab_size"] else []
    parts += [str(meaning[name]) for name in ("dtype", "source") if meaning[name]]
    return ", ".join(parts)


def _cell(column: Any, i: int) -> str:
    return str(column.values[i]) if column.valid[i] else "-"


def _mark(column: Any, i: int) -> str:
    return ("x" if column.values[i] else ".") if column.valid[i] else "-"


def _float(column: Any, i: int) -> str:
    if not column.valid[i]:
        return "-"
    value = jsonable(column.values[i])
    return value if isinstance(value, str) else f"{value:.6f}"


def ranges(numbers: list[int]) -> str:
    """1,2,3,7 as 1-3,7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def wrapped(text: str, width: int, *, separator: str = ", ") -> list[str]:
    """A text in lines that break at separators; what can be seen of those stays at the end."""
    lines: list[str] = []
    mark = separator.rstrip()
    for part in text.split(separator) if text else []:
        if lines and len(lines[-1]) + len(separator) + len(part) + len(mark) <= width:
            lines[-1] += separator + part
        else:
            lines[-1:] = [lines[-1] + mark, part] if lines else [part]
    return lines
