"""Log-probabilities over the kept set that the rollout drew from, for the trainer's loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rolltape.store.errors import UsageError
from rolltape.store.loader.batches import SupportRows
from rolltape.store.schema import SUPPORT_EXPLICIT, SUPPORT_FULL


class Renormalised(NamedTuple):
    """Log-probabilities by the position of the token; see `renormalised_logprobs`.

    Args:
        logprobs: [B, S], float64 for float64 logits, else float32; NaN where not valid.
        valid: bool [B, S].
        outside: bool [B, S]; the token is not in its own recorded kept set, so not valid.
    """

    logprobs: torch.Tensor
    valid: torch.Tensor
    outside: torch.Tensor


def renormalised_logprobs(
    logits: torch.Tensor,
    supports: SupportRows,
    tokens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    chunk_elements: int = 1 << 24,
) -> Renormalised:
    """Log-probability of each token over the set that it was drawn from. Differentiable.

    Where the state is explicit that is the recorded kept set, where it is full the whole
    vocabulary; where nothing was recorded the result is not valid. It is what the tape calls
    `processed`, if the rollout applied nothing but temperature and truncation.

    Of the logits only the kept ones are gathered; whole rows are visited `chunk_elements` at a
    time, in the backward too, which allocates the gradient of the logits and nothing as large.

    Args:
        logits: [B, S, V] as the model gives them for the whole batch: those at s are for the token
            at s + 1. Any float dtype; the arithmetic is float32, or float64 for float64.
        supports: of the batch.
        tokens: [B, S], `batch.input_ids`.
        mask: bool [B, S], positions wanted; give `batch.loss_mask`. None is all. The first token of
            a packed sequence has no logits of its own and has to be masked.
        temperature: that the logits are divided by: a number, or [B, S] by token
            (`batch.temperatures`); where it is NaN or not positive the result is not valid.
        chunk_elements: logits that are copied at a time.

    Raises:
        UsageError: shapes that do not belong together, or kept ids outside the vocabulary.
    """
    if (
        logits.dim() != 3
        or logits.shape[:2] != tokens.shape
        or supports.state.shape != tokens.shape
    ):
        raise UsageError(
            f"logits {list(logits.shape)}, tokens {list(tokens.shape)}, supports "
            f"{list(supports.state.shape)}",
            hint="expected [B, S, V], [B, S] and [B, S] of one batch",
        )
    device = logits.device
    state = supports.state.to(device)
    usable = (state == SUPPORT_EXPLICIT) | (state == SUPPORT_FULL)
    usable[:, 0] = False
    if mask is not None:
        usable &= mask.to(device)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    heat = torch.as_tensor(temperature, dtype=dtype, device=device).expand(tokens.shape)
    usable &= heat > 0  # false for NaN
    where = usable.flatten().nonzero()[:, 0]
    rows = _Rows.of(where, state, supports, tokens.to(device), heat, logits.shape)
    found, inside = _KeptLogprobs.apply(logits, rows, chunk_elements)  # type: ignore[no-untyped-call]
    outside = torch.zeros_like(usable).flatten()
    outside[where] = ~inside
    chosen = where[inside]
    logprobs = torch.full((tokens.numel(),), torch.nan, dtype=dtype, device=device)
    logprobs = logprobs.index_put((chosen,), found[inside]).view(tokens.shape)
    valid = torch.zeros_like(outside)
    valid[chosen] = True
    return Renormalised(logprobs, valid.view(tokens.shape), outside.view(tokens.shape))


class _Rows(NamedTuple):
    """The positions to compute, n of them.

    Args:
        batch: row of the logits.
        column: column of the logits, one before the token's.
        token: its id.
        heat: temperature.
        first: where its kept ids begin in `ids`.
        kept: how many there are; -1 is the whole vocabulary.
        ids: kept ids of the whole batch.
    """

    batch: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor
    heat: torch.Tensor
    first: torch.Tensor
    kept: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(
        cls,
        where: torch.Tensor,
        state: torch.Tensor,
        supports: SupportRows,
        tokens: torch.Tensor,
        heat: torch.Tensor,
        shape: torch.Size,
    ) -> _Rows:
        offsets, ids = supports.offsets.to(where.device), supports.ids.to(where.device)
        if len(offsets) != tokens.numel() + 1:
            raise UsageError(f"supports.offsets has {len(offsets)} entries, not B * S + 1")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= shape[2]):
            raise UsageError(
                f"supports.ids reach {int(ids.max())}, the logits are {shape[2]} wide",
                hint="the tape is of a model with another vocabulary",
            )
        count = offsets[where + 1] - offsets[where]
        count = torch.where(state.flatten()[where] == SUPPORT_FULL, -1, count)
        return cls(
            batch=where // tokens.shape[1],
            column=where % tokens.shape[1] - 1,
            token=tokens.flatten()[where].long(),
            heat=heat.flatten()[where],
            first=offsets[where],
            kept=count,
            ids=ids,
        )

    def chunks(self, vocab: int, most: int) -> Iterator[tuple[torch.Tensor, bool]]:
        """Positions that are visited at once, and whether over the whole vocabulary."""
        whole = self.kept < 0
        for full in (True, False):
            chosen = (whole if full else ~whole).nonzero()[:, 0]
            cost = torch.full_like(chosen, vocab) if full else self.kept[chosen]
            # a position that costs more than `most` is a chunk of its own
            number = (cost.cumsum(0) - cost) // most
            sizes = number.unique_consecutive(return_counts=True)[1].tolist()
            for part in chosen.split(sizes):
                yield part, full

    def entries(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(position within `part`, kept id) of every kept id of `part`."""
        count = self.kept[part]
        owner = torch.repeat_interleave(count)
        within = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner]
        return owner, self.ids[self.first[part][owner] + within].long()


class _KeptLogprobs(torch.autograd.Function):
    """(logits, rows) -> (logprob [n], whether the token is kept [n]).

    Autograd of plain indexing would hold a gradient of the size of the logits for every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: _Rows, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(rows.heat)
        inside = torch.ones(len(rows.token), dtype=torch.bool, device=logits.device)
        for part, full in rows.chunks(logits.shape[2], most):
            batch, column, heat = rows.batch[part], rows.column[part], rows.heat[part]
            if full:
                chunk = logits[batch, column].to(heat.dtype) / heat[:, None]
                total[part] = torch.logsumexp(chunk, -1)
                continue
            owner, ids = rows.entries(part)
            kept = logits[batch[owner], column[owner], ids].to(heat.dtype) / heat[owner]
            top = torch.full_like(heat, -torch.inf).scatter_reduce(0, owner, kept, "amax")
            # a set of nothing but -inf has no maximum to subtract
            top = torch.where(top.isinf(), 0.0, top)
            sums = torch.zeros_like(heat).index_add(0, owner, (kept - top[owner]).exp())
            total[part] = top + sums.log()
            hits = (ids == rows.token[part][owner]).to(torch.int32)
            inside[part] = torch.zeros_like(part, dtype=torch.int32).index_add(0, owner, hits) > 0
        own = logits[rows.batch, rows.column, rows.token].to(rows.heat.dtype) / rows.heat
        ctx.save_for_backward(logits, total, inside)
        ctx.rows, ctx.most = rows, most
        ctx.mark_non_differentiable(inside)
        return own - total, inside

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:
        logits, total, inside = ctx.saved_tensors
        rows: _Rows = ctx.rows
        out = torch.zeros_like(logits)
        # d logprob / d logit = (1[is the token] - p) / temperature
        scale = torch.where(inside, grad, 0.0) / rows.heat
        for part, full in rows.chunks(logits.shape[2], ctx.most):
            batch, column, heat = rows.batch[part], rows.column[part], rows.heat[part]
            scaled, logsum = scale[part], total[part]
            if full:
                chunk = logits[batch, column].to(heat.dtype) / heat[:, None]
                chunk.sub_(logsum[:, None]).exp_().mul_(-scaled[:, None])
                chunk[torch.arange(len(part), device=part.device), rows.token[part]] += scaled
                out[batch, column] = chunk.to(out.dtype)
                continue
            owner, ids = rows.entries(part)
            kept = logits[batch[owner], column[owner], ids].to(heat.dtype) / heat[owner]
            change = -(kept - logsum[owner]).exp() * scaled[owner]
            change += torch.where(ids == rows.token[part][owner], scaled[owner], 0.0)
            out[batch[owner], column[owner], ids] = change.to(out.dtype)
        return out, None, None
