"""Training batches: sequences of a tape laid out as tensors, packed or padded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from rolltape.store.columns import Masked
from rolltape.store.errors import SchemaError, UsageError
from rolltape.store.routes import Routes
from rolltape.store.schema import SUPPORT_UNRECORDED
from rolltape.store.sequences import LOGPROBS
from rolltape.store.sequences import Sequence as TapeSequence
from rolltape.store.supports import Supports

Layout = Literal["padded", "packed"]
Side = Literal["right", "left"]

#: What can be asked for beside token ids and masks.
COLUMNS = ("logprobs", "routes", "supports", "weight_version", "annotations")


@dataclass(frozen=True)
class Wanted:
    """What to read of each sequence.

    Args:
        columns: some of `COLUMNS`.
        logprob: the logprob column: processed, scaled or raw.
        layers: model layer numbers of the routes wanted, in that order; None is all.
    """

    columns: tuple[str, ...] = ("logprobs",)
    logprob: str = "processed"
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        columns = (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise UsageError(f"no column {unknown[0]!r}", hint=" | ".join(COLUMNS))
        if self.logprob not in LOGPROBS:
            raise UsageError(f"no logprob column {self.logprob!r}", hint=" | ".join(LOGPROBS))
        object.__setattr__(self, "columns", columns)
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))

    def __contains__(self, column: str) -> bool:
        return column in self.columns


@dataclass(frozen=True)
class Sample:
    """One sequence, as numpy arrays over its T positions. What was not asked for is None.

    Args:
        id: of the sequence.
        index: number in the selection.
        group: number of its group in the selection.
        prompt_len: prompt tokens.
        tokens: uint32 [T].
        loss_mask: bool [T]; false where it is not known.
        logprobs: float32 [T], invalid where not recorded.
        semantics: (start, n, semantics) of the spans of `logprobs`.
        routes: of role `used`, None also where nothing was recorded.
        supports: None also where nothing was recorded.
        weight_version: int64 [T], invalid where not known.
        annotations: by name.
    """

    id: str
    index: int
    group: int
    prompt_len: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: Masked | None = None
    semantics: tuple[tuple[int, int, dict[str, Any]], ...] = ()
    routes: Routes | None = None
    supports: Supports | None = None
    weight_version: Masked | None = None
    annotations: dict[str, float | str] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def read_sample(
    sequence: TapeSequence, wanted: Wanted, *, index: int, group: int, prompt_len: int
) -> Sample:
    """Read one sequence.

    Args:
        sequence: of a tape.
        wanted: what to read of it.
        index: its number in the selection.
        group: number of its group.
        prompt_len: its prompt tokens, which the caller knows from the roll-ups.

    Raises:
        SchemaError: some of its tokens are not on the tape.
    """
    tokens = sequence.tokens
    if not tokens.valid.all():
        hole = int(np.argmin(tokens.valid))
        raise SchemaError(
            f"{sequence.id}: tokens.ids has nothing at position {hole} of {len(tokens)}",
            hint=f"leave it out: exclude=({sequence.id!r},)",
        )
    mask = sequence.loss_mask
    logprobs = "logprobs" in wanted
    return Sample(
        id=sequence.id,
        index=index,
        group=group,
        prompt_len=prompt_len,
        tokens=tokens.values,
        loss_mask=mask.values & mask.valid,
        logprobs=sequence.logprob(wanted.logprob) if logprobs else None,
        semantics=tuple(sequence.semantics) if logprobs else (),
        routes=sequence.routes(layers=wanted.layers) if "routes" in wanted else None,
        supports=sequence.supports() if "supports" in wanted else None,
        weight_version=sequence.weight_version if "weight_version" in wanted else None,
        annotations=dict(sequence.annotations) if "annotations" in wanted else None,
    )


@dataclass(frozen=True)
class SupportRows:
    """Kept token ids of every position of a batch, as CSR over its B * S positions, row by row.

    Args:
        state: uint8 [B, S]: full, explicit or unrecorded (`rolltape.store.schema.SUPPORT_*`);
            unrecorded on padding.
        offsets: int64 [B * S + 1]; position (b, s) owns ids[offsets[b * S + s] : ... + 1].
        ids: int32 token ids.
    """

    state: torch.Tensor
    offsets: torch.Tensor
    ids: torch.Tensor


T = TypeVar("T", "Batch", SupportRows)


@dataclass(frozen=True)
class Batch:
    """Sequences as one forward takes them: `padded` one a row, `packed` all in one row.

    B rows, S columns, n sequences. Every [B, S] field is indexed by the position of the *token*:
    the logits that gave it stand one column before. What was not asked for is None. Float values
    that are missing are NaN and have a mask beside them: select by the mask before you compute.

    Args:
        layout: padded or packed.
        input_ids: int64 [B, S].
        attention_mask: bool [B, S], true on tokens.
        position_ids: int64 [B, S], from 0 in each sequence; 0 on padding.
        response_mask: bool [B, S], true on response tokens.
        loss_mask: bool [B, S], true where the loss counts.
        cu_seqlens: int32 [n + 1], packed only: sequence i is columns cu[i] : cu[i + 1].
        columns: int64 [n], column of the first token of each sequence; its row is i if padded, 0
            if packed.
        lengths: int64 [n], tokens.
        prompt_lens: int64 [n], of them the prompt.
        group_index: int64 [n], number of the group in the selection.
        ids: of the sequences.
        indexes: numbers of the sequences in the selection.
        padding: the batch only evens out the ranks: real tokens, but a loss mask of zeros.
        logprobs: float32 [B, S] that the rollout recorded, NaN where it did not.
        logprobs_valid: bool [B, S].
        temperatures: float32 [B, S] that those were drawn at, NaN where it is not known.
        semantics: of each sequence, (start, n, what its logprobs mean) by position.
        routes: uint8 or uint16 [B, S, layers, k] expert ids; undefined where not valid.
        routes_valid: bool [B, S, layers].
        route_layers: model layer number of each column of `routes`.
        num_experts: experts a layer.
        supports: kept token ids.
        weight_version: int64 [B, S]; undefined where not valid.
        weight_version_valid: bool [B, S].
        annotations: of each sequence, by name.
    """

    layout: Layout
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None
    columns: torch.Tensor
    lengths: torch.Tensor
    prompt_lens: torch.Tensor
    group_index: torch.Tensor
    ids: tuple[str, ...]
    indexes: tuple[int, ...]
    padding: bool = False
    logprobs: torch.Tensor | None = None
    logprobs_valid: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    semantics: tuple[tuple[tuple[int, int, dict[str, Any]], ...], ...] = ()
    routes: torch.Tensor | None = None
    routes_valid: torch.Tensor | None = None
    route_layers: tuple[int, ...] = ()
    num_experts: int | None = None
    supports: SupportRows | None = None
    weight_version: torch.Tensor | None = None
    weight_version_valid: torch.Tensor | None = None
    annotations: tuple[dict[str, float | str], ...] | None = None

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    def span(self, i: int) -> tuple[int, slice]:
        """Index of the tokens of sequence i in a [B, S, ...] tensor."""
        column = int(self.columns[i])
        row = i if self.layout == "padded" else 0
        return row, slice(column, column + int(self.lengths[i]))

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """Spread one value a sequence over its tokens.

        Args:
            values: [n], for example advantages.

        Returns:
            [B, S], zero on padding.
        """
        out = torch.zeros(self.input_ids.shape, dtype=values.dtype, device=values.device)
        for i, value in enumerate(values):
            out[self.span(i)] = value
        return out

    def annotation(self, name: str) -> torch.Tensor:
        """A number of each sequence, float64 [n].

        Raises:
            UsageError: some sequence has no such annotation, or a text.
        """
        values = []
        for id_, known in zip(self.ids, self.annotations or ({},) * len(self), strict=True):
            value = known.get(name)
            if not isinstance(value, float | int):
                found = "is a text" if isinstance(value, str) else "is not there"
                raise UsageError(
                    f"{id_}: annotation {name!r} {found}", hint="columns=('annotations', ...)"
                )
            values.append(float(value))
        return torch.tensor(values, dtype=torch.float64)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return _mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in pinned memory; a DataLoader calls it."""
        return _mapped(self, lambda tensor: tensor.pin_memory())


def _mapped(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    changes: dict[str, Any] = {}
    for name in value.__dataclass_fields__:
        found = getattr(value, name)
        if isinstance(found, torch.Tensor):
            changes[name] = change(found)
        elif isinstance(found, SupportRows):
            changes[name] = _mapped(found, change)
    return replace(value, **changes)


def collate(
    samples: Sequence[Sample],
    *,
    layout: Layout = "padded",
    padding_side: Side = "right",
    pad_token: int = 0,
    padding: bool = False,
) -> Batch:
    """Lay sequences out as one batch.

    Args:
        samples: at least one.
        layout: `padded`, or `packed` into one row without padding.
        padding_side: where padding goes.
        pad_token: id that stands on padding.
        padding: make it one that only evens out the ranks: its loss mask is all zero.

    Raises:
        UsageError: no samples, an unknown layout, or routes of different models.
    """
    if not samples:
        raise UsageError("a batch needs a sequence")
    place = _Place.of(samples, layout, padding_side)
    tokens = np.full(place.shape, pad_token, np.int64)
    attention, response, loss = (np.zeros(place.shape, bool) for _ in range(3))
    positions = np.zeros(place.shape, np.int64)
    for sample, span in zip(samples, place.spans, strict=True):
        tokens[span] = sample.tokens
        attention[span] = True
        positions[span] = np.arange(len(sample))
        response[span][sample.prompt_len :] = True
        if not padding:
            loss[span] = sample.loss_mask
    lengths = np.array([len(s) for s in samples], np.int64)
    return Batch(
        layout=layout,
        input_ids=torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(attention),
        position_ids=torch.from_numpy(positions),
        response_mask=torch.from_numpy(response),
        loss_mask=torch.from_numpy(loss),
        cu_seqlens=torch.from_numpy(place.edges.astype(np.int32)) if layout == "packed" else None,
        columns=torch.tensor([span[1].start for span in place.spans]),
        lengths=torch.from_numpy(lengths),
        prompt_lens=torch.tensor([s.prompt_len for s in samples]),
        group_index=torch.tensor([s.group for s in samples]),
        ids=tuple(s.id for s in samples),
        indexes=tuple(s.index for s in samples),
        padding=padding,
        **_logprobs(samples, place),
        **_routes(samples, place),
        **_supports(samples, place),
        **_versions(samples, place),
        annotations=_annotations(samples),
    )


@dataclass(frozen=True)
class _Place:
    """Where the samples go: `spans` index [B, S, ...] arrays of `shape` (B, S)."""

    shape: tuple[int, int]
    spans: list[tuple[int, slice]]
    edges: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[Sample], layout: Layout, side: Side) -> _Place:
        lengths = [len(s) for s in samples]
        edges = np.concatenate([[0], np.cumsum(lengths)])
        if layout == "packed":
            spans = [(0, slice(int(a), int(b))) for a, b in itertools.pairwise(edges)]
            return cls((1, int(edges[-1])), spans, edges)
        if layout != "padded" or side not in ("left", "right"):
            raise UsageError(
                f"layout {layout!r}, padding_side {side!r}", hint="padded | packed; left | right"
            )
        width = max(lengths)
        starts = [width - n if side == "left" else 0 for n in lengths]
        spans = [(i, slice(a, a + n)) for i, (a, n) in enumerate(zip(starts, lengths, strict=True))]
        return cls((len(samples), width), spans, edges)


def _logprobs(samples: Sequence[Sample], place: _Place) -> dict[str, Any]:
    if samples[0].logprobs is None:
        return {}
    values = np.full(place.shape, np.nan, np.float32)
    valid = np.zeros(place.shape, bool)
    temperatures = np.full(place.shape, np.nan, np.float32)
    for sample, span in zip(samples, place.spans, strict=True):
        assert sample.logprobs is not None
        known = sample.logprobs.valid
        values[span][known] = sample.logprobs.values[known]
        valid[span] = known
        # by start: where spans overlap, the one that begins first counts
        for start, n, semantics in reversed(sample.semantics):
            if semantics["temperature"] is not None:
                temperatures[span][start : start + n] = semantics["temperature"]
    return {
        "logprobs": torch.from_numpy(values),
        "logprobs_valid": torch.from_numpy(valid),
        "temperatures": torch.from_numpy(temperatures),
        "semantics": tuple(s.semantics for s in samples),
    }


def _routes(samples: Sequence[Sample], place: _Place) -> dict[str, Any]:
    first = next((s.routes for s in samples if s.routes is not None), None)
    if first is None:
        return {}
    k = first.ids.shape[2]
    model = (first.layers, first.num_experts, k)
    whole = all(s.routes is not None for s in samples) and place.shape[0] * place.shape[1] == int(
        place.edges[-1]
    )
    make = np.empty if whole else np.zeros  # without holes every element is written below
    ids = make((*place.shape, len(first.layers), k), first.ids.dtype)
    valid = make((*place.shape, len(first.layers)), bool)
    for sample, span in zip(samples, place.spans, strict=True):
        routes = sample.routes
        if routes is None:
            continue
        if (routes.layers, routes.num_experts, routes.ids.shape[2]) != model:
            raise UsageError(
                f"{sample.id} has routes of {len(routes.layers)} layers, {routes.num_experts} "
                f"experts, top {routes.ids.shape[2]}; others of the batch of {len(model[0])}, "
                f"{model[1]}, top {k}",
                hint="sequences of different models cannot share a batch",
            )
        ids[span] = routes.ids
        valid[span] = routes.valid
    return {
        "routes": torch.from_numpy(ids),
        "routes_valid": torch.from_numpy(valid),
        "route_layers": first.layers,
        "num_experts": first.num_experts,
    }


def _supports(samples: Sequence[Sample], place: _Place) -> dict[str, Any]:
    if all(s.supports is None for s in samples):
        return {}
    state = np.full(place.shape, SUPPORT_UNRECORDED, np.uint8)
    counts = np.zeros(place.shape, np.int64)
    ids = []
    for sample, span in zip(samples, place.spans, strict=True):
        if sample.supports is not None:
            state[span] = sample.supports.state
            counts[span] = np.diff(sample.supports.offsets)
            ids.append(sample.supports.ids)
    offsets = np.concatenate([[0], np.cumsum(counts.ravel())])
    return {
        "supports": SupportRows(
            torch.from_numpy(state),
            torch.from_numpy(offsets),
            torch.from_numpy(np.concatenate(ids).astype(np.int32)),
        )
    }


def _versions(samples: Sequence[Sample], place: _Place) -> dict[str, Any]:
    if samples[0].weight_version is None:
        return {}
    values = np.zeros(place.shape, np.int64)
    valid = np.zeros(place.shape, bool)
    for sample, span in zip(samples, place.spans, strict=True):
        assert sample.weight_version is not None
        values[span] = sample.weight_version.values
        valid[span] = sample.weight_version.valid
    return {
        "weight_version": torch.from_numpy(values),
        "weight_version_valid": torch.from_numpy(valid),
    }


def _annotations(samples: Iterable[Sample]) -> tuple[dict[str, float | str], ...] | None:
    found = [s.annotations for s in samples]
    return None if found[0] is None else tuple(a or {} for a in found)
