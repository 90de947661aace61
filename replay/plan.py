"""What a scoring is asked to do, and everything that can be refused before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rolltape.recorder.facts import model_facts
from rolltape.recorder.moe import find_moe_blocks
from rolltape.replay.batches import Batch, Layout, check_separation, make_batches
from rolltape.replay.forcing import Mode, self_test
from rolltape.replay.models import Match, check_model
from rolltape.replay.ranks import ALONE, Ranks, is_sharded
from rolltape.replay.sites import select_sites, sites_of
from rolltape.replay.switches import Switches
from rolltape.replay.versions import as_version, check_known
from rolltape.store import Routes, Tape, TapeExistsError, UsageError, new_uuid
from rolltape.store import Sequence as TapeSequence

#: Changes the routes of a sequence before they are forced; for controls that must fail.
RouteTransform = Callable[[TapeSequence, Routes], Routes]

_SELF_TEST_TOKENS = 128
_LAYOUTS: dict[str, Layout] = {"padded": "padded", "packed": "packed"}
_MODES: dict[str, Mode] = {"ids": "ids", "ids+weights": "ids+weights"}


def as_layout(name: str) -> Layout:
    """A layout by its name.

    Raises:
        UsageError: no such layout.
    """
    if name not in _LAYOUTS:
        raise UsageError(f"no layout {name!r}", hint=" | ".join(_LAYOUTS))
    return _LAYOUTS[name]


@dataclass(frozen=True)
class Options:
    """How to run.

    Args:
        switches: controlled changes.
        layout: `padded` or `packed`.
        tokens_per_batch: tokens of one forward, padding included.
        layers: keep the outputs of all decoder layers for so many sequences.
        sequences: ids of the sequences to keep layer outputs for, instead of the first ones.
        sites: patterns of the sites to keep instead of layer outputs.
        transform_routes: changes the routes of each sequence before they are forced.
        on: `transformers`, or the factory whose model it is.
    """

    switches: Switches
    layout: Layout = "padded"
    tokens_per_batch: int = 8192
    layers: int = 0
    sequences: Sequence[str] | None = None
    sites: str | None = None
    transform_routes: RouteTransform | None = None
    on: str = "transformers"

    @property
    def mode(self) -> Mode | None:
        """Forcing mode; None when the routing is live."""
        return _MODES.get(self.switches.routing)

    def as_dict(self) -> dict[str, Any]:
        """What is kept of it in the tape."""
        return {
            "switches": self.switches.as_dict(),
            "layout": self.layout,
            "tokens_per_batch": self.tokens_per_batch,
            "on": self.on,
        }


@dataclass
class Run:
    """One scoring: what goes in, and what is found out on the way.

    Args:
        sequences: that are scored, in the order of the tape.
        matches: how the model belongs to each engine of the tape.
        engines: engine of the tape -> engine of the new tape.
        layer_keys: sequences whose layer outputs are kept.
        ranks: that run the model together.
        values: of several ranks: sequence -> hash of what was scored.
        warnings: for the summary.
        counts: for the summary.
    """

    tape: Tape
    model: nn.Module
    name: str
    options: Options
    device: torch.device
    sequences: list[TapeSequence]
    matches: dict[str, Match]
    engines: dict[str, str]
    layer_keys: frozenset[str]
    ranks: Ranks = ALONE
    values: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, **more: int) -> None:
        """Add to counts."""
        for name, value in more.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def warn(self, text: str) -> None:
        """Say something once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def batches(self) -> list[Batch]:
        """All forwards. Sequences of different engines are never mixed."""
        return [
            batch
            for engine in self.engines
            for batch in make_batches(
                (s for s in self.sequences if s.key.engine == engine),
                tokens_per_batch=self.options.tokens_per_batch,
                layout=self.options.layout,
            )
        ]


def check_request(tape: Tape, out: Path, switches: Switches) -> None:
    """What can be refused without the model.

    Raises:
        UsageError: a switch that this tape cannot do, or nothing to score.
        TapeExistsError: there is something at `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapeExistsError(f"{out} is not an empty folder", hint="choose another -o")
    if not len(tape):
        raise UsageError(f"{tape.place} has no sequences")
    version = as_version(switches.weights)
    if version is not None:
        check_known(tape, [version])
    dense = [row["moe_layers"] == [] for row in tape.engines.values()]
    for name, default in (("routing", "live"), ("router", "model")):
        value = getattr(switches, name)
        if value != default and dense and all(dense):
            raise UsageError(f"switch {name}={value}: the model of {tape.place} is dense")
    if switches.routing != "live" and not tape.table("routes").num_rows:
        raise UsageError(
            f"switch routing={switches.routing}: {tape.place} has no routes",
            hint="record with routes, or replay with routing=live",
        )
    weights = tape.table("routes").column("weights")
    if switches.routing == "ids+weights" and weights.null_count == len(weights):
        raise UsageError(
            f"switch routing=ids+weights: the routes of {tape.place} have no weights",
            hint="routing=ids",
        )
    if switches.support == "recorded" and not tape.table("supports").num_rows:
        raise UsageError(
            f"switch support=recorded: {tape.place} has no supports", hint="support=full"
        )


def prepare(
    tape: Tape, model: nn.Module, options: Options, *, name: str | None, ranks: Ranks = ALONE
) -> Run:
    """Choose the sequences and prove that the model is the tape's.

    Raises:
        ModelMismatchError: it is another model.
        UsageError: no sequence that can be scored, or a switch that the model cannot do.
    """
    whole = [s for s in tape if s.tokens.valid.all()]
    if not any(s.length for s in whole):
        raise UsageError(f"{tape.place} has no sequence whose tokens are all known")
    engines = list(dict.fromkeys(s.key.engine for s in whole))
    if options.sites is not None:
        select_sites(sites_of(model), options.sites)
        if not options.layers and not options.sequences:
            raise UsageError("sites of which sequences?", hint="--sequences ID,ID or --layers N")
    config: Any = model.config
    name = name or getattr(config, "_name_or_path", None) or type(model).__name__
    _check_sharded(model, options.switches)
    weights = options.switches.weights
    matches = check_model(tape, model, engines, name, ranks=ranks, weights=weights)
    if options.mode is not None and not find_moe_blocks(model):
        raise UsageError(f"switch routing={options.mode}: {name} has no MoE block")
    chosen = whole[: max(0, options.layers)]
    if options.sequences:
        chosen = [tape.sequence(s) for s in options.sequences]
    run = Run(
        tape=tape,
        model=model,
        name=name,
        options=options,
        device=next(model.parameters()).device,
        sequences=whole,
        matches=matches,
        engines={engine: new_uuid() for engine in engines},
        layer_keys=frozenset(s.key.text for s in chosen),
        ranks=ranks,
    )
    if len(whole) < len(tape):
        run.warn(
            f"{len(tape) - len(whole)} of {len(tape)} sequences are left out: "
            "some of their tokens are not known"
        )
    for match in matches.values():
        for warning in match.warnings:
            run.warn(warning)
    _check_tokens(run)
    _check_versions(run)
    return run


def prove(run: Run, batches: list[Batch]) -> dict[str, Any] | None:
    """Prove on the first batches that the layout and the force do what they should.

    Returns:
        The result of the force's self-test, None when nothing is forced.

    Raises:
        UsageError: the model does not keep packed sequences apart.
        ForcingError: forcing the model's own routes changes a bit.
    """
    if run.options.layout == "packed":
        several = [b for b in batches if len(b.placed) > 1]
        if several:
            check_separation(run.model, several[0], run.device)
    if run.options.mode is None:
        return None
    # small, since it is run three times and the logits of all three are alive at once, but not
    # so small that it proves nothing
    sizes = [sum(p.sequence.length for p in batch.placed) for batch in batches]
    enough = [size for size in sizes if size >= _SELF_TEST_TOKENS]
    chosen = batches[sizes.index(min(enough, default=max(sizes)))]
    return self_test(run.model, chosen.inputs(run.device), mode=run.options.mode)


def _check_sharded(model: nn.Module, switches: Switches) -> None:
    if not is_sharded(model):
        return
    for key in ("dtype", "lm_head", "router"):
        value = getattr(switches, key)
        if value != "model":
            # the sharding keeps tensors of its own: other data in the parameters would not be used
            raise UsageError(
                f"switch {key}={value}: the weights of {type(model).__name__} are sharded",
                hint="score with a model that is not sharded",
            )


def _check_tokens(run: Run) -> None:
    width = int(model_facts(run.model)["vocab_size"])
    for s in run.sequences:
        ids = s.tokens.values
        if s.length and int(ids.max()) >= width:
            raise UsageError(
                f"{s.id} has token {int(ids.max())} at position {int(ids.argmax())}, the "
                f"vocabulary of {run.name} has {width}"
            )


def _check_versions(run: Run) -> None:
    other = 0
    for s in run.sequences:
        match = run.matches[s.key.engine]
        if match.version is not None and len(match.versions) > 1:
            made = s.weight_version
            other += bool((made.values[made.valid] != match.version).any())
    if other:
        run.warn(
            f"{other} of {len(run.sequences)} sequences have tokens made by another weight version "
            "than the model's: they are scored, but a diff mixes the change of weights in"
        )
