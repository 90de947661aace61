"""Logprobs over recorded kept sets: values, gradients, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

from rolltape.store.errors import UsageError  # noqa: E402
from rolltape.store.loader import SupportRows, renormalised_logprobs  # noqa: E402
from rolltape.store.schema import (  # noqa: E402
    SUPPORT_EXPLICIT,
    SUPPORT_FULL,
    SUPPORT_UNRECORDED,
)

STATES = (SUPPORT_FULL, SUPPORT_EXPLICIT, SUPPORT_UNRECORDED)


def problem(
    shape: tuple[int, int], vocab: int, *, seed: int = 0, kept: int = 6
) -> tuple[Any, Any, list[list[np.ndarray]]]:
    """Tokens, supports of mixed states, and the kept sets as arrays."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, shape)
    state = rng.choice(STATES, shape).astype(np.uint8)
    sets: list[list[np.ndarray]] = []
    for row in range(shape[0]):
        sets.append([])
        for column in range(shape[1]):
            extra = rng.integers(0, vocab, int(rng.integers(0, kept)))
            found = np.unique(np.append(extra, tokens[row, column]))
            explicit = state[row, column] == SUPPORT_EXPLICIT
            sets[-1].append(found if explicit else np.zeros(0, np.int64))
    counts = [len(s) for row in sets for s in row]
    supports = SupportRows(
        torch.from_numpy(state),
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        torch.from_numpy(np.concatenate([s for row in sets for s in row]).astype(np.int32)),
    )
    return torch.from_numpy(tokens), supports, sets


def dense(logits: Any, tokens: Any, supports: SupportRows, sets: Any, heat: Any) -> Any:
    """The same by masked log-softmax of whole rows; NaN where not valid."""
    out = torch.full(tokens.shape, torch.nan, dtype=logits.dtype)
    for row in range(tokens.shape[0]):
        for column in range(1, tokens.shape[1]):
            state = supports.state[row, column]
            if state == SUPPORT_UNRECORDED:
                continue
            scaled = logits[row, column - 1] / heat[row, column]
            if state == SUPPORT_EXPLICIT:
                keep = torch.zeros(scaled.shape, dtype=torch.bool)
                keep[torch.from_numpy(sets[row][column])] = True
                scaled = scaled.masked_fill(~keep, -torch.inf)
            out[row, column] = torch.log_softmax(scaled, -1)[tokens[row, column]]
    return out


@pytest.mark.parametrize("chunk", [1, 20, 1 << 24])
def test_values_are_those_of_a_masked_log_softmax(chunk: int) -> None:
    tokens, supports, sets = problem((3, 40), 17)
    logits = torch.randn(3, 40, 17, dtype=torch.float64)
    heat = torch.rand(3, 40, dtype=torch.float64) + 0.5
    found = renormalised_logprobs(logits, supports, tokens, temperature=heat, chunk_elements=chunk)
    expected = dense(logits, tokens, supports, sets, heat)
    assert torch.equal(found.valid, ~expected.isnan()) and 40 < found.valid.sum() < 117
    assert torch.allclose(found.logprobs, expected, rtol=0, atol=1e-12, equal_nan=True)
    assert not found.outside.any()


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_gradients_are_right(chunk: int) -> None:
    tokens, supports, sets = problem((2, 9), 11)
    logits = torch.randn(2, 9, 11, dtype=torch.float64, requires_grad=True)
    heat = torch.rand(2, 9, dtype=torch.float64) + 0.5

    def valid_ones(logits: Any) -> Any:
        found = renormalised_logprobs(
            logits, supports, tokens, temperature=heat, chunk_elements=chunk
        )
        return found.logprobs[found.valid]

    assert torch.autograd.gradcheck(valid_ones, (logits,))
    weights = torch.randn(int((~dense(logits, tokens, supports, sets, heat).isnan()).sum()))
    (ours,) = torch.autograd.grad((valid_ones(logits) * weights).sum(), logits)
    reference = dense(logits, tokens, supports, sets, heat)
    (theirs,) = torch.autograd.grad((reference[~reference.isnan()] * weights).sum(), logits)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_mask_limits_what_is_computed() -> None:
    tokens, supports, _ = problem((2, 12), 9)
    logits = torch.randn(2, 12, 9, requires_grad=True)
    mask = torch.rand(2, 12) < 0.5
    whole = renormalised_logprobs(logits, supports, tokens)
    part = renormalised_logprobs(logits, supports, tokens, mask=mask)
    assert torch.equal(part.valid, whole.valid & mask)
    assert torch.equal(part.logprobs[part.valid], whole.logprobs[part.valid])
    part.logprobs[part.valid].sum().backward()
    touched = logits.grad.abs().sum(-1) > 0
    assert not (touched[:, :-1] & ~part.valid[:, 1:]).any()


def test_an_unknown_temperature_is_not_taken_for_one() -> None:
    tokens, supports, _ = problem((1, 20), 9)
    heat = torch.full((1, 20), 0.7)
    heat[0, 5:10] = torch.nan
    found = renormalised_logprobs(torch.randn(1, 20, 9), supports, tokens, temperature=heat)
    assert not found.valid[0, 5:10].any() and found.valid.any()


def test_a_token_outside_of_its_own_kept_set_is_said() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    supports = SupportRows(
        torch.tensor([[2, 1, 1]], dtype=torch.uint8),
        torch.tensor([0, 0, 2, 4]),
        torch.tensor([2, 5, 4, 6], dtype=torch.int32),
    )
    logits = torch.randn(1, 3, 8, requires_grad=True)
    found = renormalised_logprobs(logits, supports, tokens)
    assert found.valid.tolist() == [[False, True, False]]
    assert found.outside.tolist() == [[False, False, True]]
    found.logprobs[found.valid].sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[0, 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: Any) -> None:
    tokens, supports, sets = problem((2, 30), 50)
    logits = torch.randn(2, 30, 50).to(dtype).requires_grad_()
    found = renormalised_logprobs(logits, supports, tokens)
    expected = dense(logits.detach().double(), tokens, supports, sets, torch.ones(2, 30))
    assert found.logprobs.dtype == torch.float32
    assert torch.allclose(found.logprobs.double(), expected, rtol=0, atol=1e-5, equal_nan=True)
    found.logprobs[found.valid].sum().backward()
    assert logits.grad.dtype == dtype and logits.grad.isfinite().all()


def test_logits_that_are_a_view_are_not_copied() -> None:
    tokens, supports, _ = problem((2, 10), 9)
    wide = torch.randn(2, 10, 12)
    with Largest() as seen:
        view = renormalised_logprobs(wide[:, :, :9], supports, tokens, chunk_elements=32)
    whole = renormalised_logprobs(wide[:, :, :9].contiguous(), supports, tokens)
    assert torch.equal(view.valid, whole.valid)
    assert torch.allclose(view.logprobs, whole.logprobs, equal_nan=True)
    assert seen.elements < 180


def test_what_does_not_belong_together_is_refused() -> None:
    tokens, supports, _ = problem((2, 10), 9)
    with pytest.raises(UsageError, match=r"logits \[2, 9, 9\]"):
        renormalised_logprobs(torch.randn(2, 9, 9), supports, tokens)
    with pytest.raises(UsageError, match="the logits are 4 wide"):
        renormalised_logprobs(torch.randn(2, 10, 4), supports, tokens)


class Largest(TorchDispatchMode):
    """The largest tensor that is made, and how many are as large as the logits."""

    def __init__(self, logits: int = 1 << 62) -> None:
        super().__init__()
        self.elements = self.whole = 0
        self._logits = logits
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage().data_ptr()
            for t in tree_flatten((args, kwargs or {}))[0]
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_flatten(out)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.untyped_storage().data_ptr() in inputs:
                continue  # a view, or in place
            self.elements = max(self.elements, tensor.numel())
            self.whole += tensor.numel() >= self._logits
        return out


@pytest.mark.parametrize("kept", [6, 3000])
def test_nothing_as_large_as_the_logits_is_made_but_their_gradient(kept: int) -> None:
    shape, vocab, chunk = (2, 60), 4000, 20_000
    tokens, supports, _ = problem(shape, vocab, kept=kept)
    logits = torch.randn(*shape, vocab, requires_grad=True)
    with Largest() as forward:
        found = renormalised_logprobs(logits, supports, tokens, chunk_elements=chunk)
        loss = found.logprobs[found.valid].sum()
    assert forward.elements <= 2 * chunk
    with Largest(logits.numel()) as backward:
        (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.numel() == logits.numel() and backward.whole == 1
