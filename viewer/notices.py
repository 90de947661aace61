"""States of a run that need words: what is the matter, and the commands that help."""

from __future__ import annotations

import shlex
from typing import Any

from rolltape.store.sequences import Tape
from rolltape.viewer.happenings import detail_words
from rolltape.viewer.library import Pair
from rolltape.viewer.weights import alarms


def notices(pair: Pair) -> list[dict[str, Any]]:
    """States of the run that need words: level, title, text, commands to copy."""
    found: list[dict[str, Any]] = [*alarms(pair)]
    tape = pair.tape
    if tape is None:
        path = pair.side("a").get("path")
        command = ["rolltape", "view", str(path or "TAPE_A"), str(pair.report and pair.report.path)]
        found.append(
            _notice(
                "warn",
                "The tape of this report is not open",
                "Token ids, text, steps and routes come from the tape; the numbers below come "
                "from the report alone. Start the viewer with the tape as well.",
                [command],
            )
        )
    elif pair.report is None:
        found.append(_no_report(pair, tape))
    if pair.report is not None and pair.b is None:
        path = pair.side("b").get("path")
        text = "Its routes and steps are not shown. Start the viewer with it as well."
        command = ["rolltape", "view", *(_paths(pair)), str(path or "TAPE_B")]
        found.append(_notice("info", "Tape B is not open", text, [command]))
    if tape is not None and tape.seal is None:
        many = _times(len(pair.facts), "sequence")
        text = (
            f"{many} so far. The tape is not sealed: what is shown has "
            "reached the disk, and this page follows it. If the job is dead, this is all that "
            "there is, and it is whole."
        )
        found.append(_notice("info", "Still recording", text))
    if not pair.counts["compared"] and (masked := pair.counts["masked"]):
        text = (
            f"The loss mask excludes all {masked:,} tokens that both sides scored, so there "
            "is no difference to show. Check the mask that the job gave to the trainer."
        )
        found.append(_notice("warn", "All tokens are masked", text))
    if tape is not None:
        found += _event_notices(pair)
    for problem in pair.problems:
        text = f"{problem.rstrip('.')}. Everything else is served."
        found.append(_notice("error", "Damaged shard", text))
    return found


def _no_report(pair: Pair, tape: Tape) -> dict[str, Any]:
    path = str(tape.path)
    report = f"{path}-report"
    if pair.as_b:
        return {
            **_notice(
                "info", "Side B of a report", "Its sequences can be looked at here. Compared:"
            ),
            "links": [{"text": r.path.name, "run": run, "rep": r.uuid} for run, r in pair.as_b],
        }
    if tape.parent is not None:
        parent = str(pair.parent.path) if pair.parent is not None else "TAPE_A"
        return _notice(
            "info",
            "A replay without a report",
            f"This tape replays {parent if pair.parent else f'tape {tape.parent}'}. "
            "Compare the two.",
            [
                ["rolltape", "diff", parent, path, "-o", report],
                ["rolltape", "view", parent, path, report],
            ],
        )
    replay = f"{path}.replay"
    return _notice(
        "info",
        "No report of this tape is open",
        "Replay the tape as the trainer would score it, compare the two, and open all three.",
        [
            ["rolltape", "replay", path, "-o", replay, "--on", "transformers", "--mode", "score"],
            ["rolltape", "diff", path, replay, "-o", report],
            ["rolltape", "view", path, replay, report],
        ],
    )


def _event_notices(pair: Pair) -> list[dict[str, Any]]:
    found = []
    titles = {
        "gap": ("error", "The recorder dropped data"),
        "hook_error": ("error", "A recording hook failed"),
    }
    for kind, (level, title) in titles.items():
        count, detail = pair.events.get(kind, (0, None))
        if count:
            text = f"{_times(count, 'time')}; the first one: {detail_words(detail) or 'no detail'}"
            found.append(_notice(level, title, text))
    return found


def _times(n: int, word: str) -> str:
    return f"{n:,} {word}" + ("s" if n != 1 else "")


def _paths(pair: Pair) -> list[str]:
    return [str(f.path) for f in (pair.tape, pair.report) if f is not None]


def _notice(
    level: str, title: str, text: str, commands: list[list[str]] | None = None
) -> dict[str, Any]:
    lines = [shlex.join(command) for command in commands or []]
    return {"level": level, "title": title, "text": text, "commands": lines}
