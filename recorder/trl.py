"""Records what TRL's GRPO trainer computes: old, current and reference logprobs, rewards.

`GRPOTrainer` has one method that all of its logprobs come from. It is patched, and the two that
give rewards and advantages; without a session they do what they did. A version without one of them
is recorded without what it gives, see `rolltape.recorder.trl_targets`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from typing import Any

import torch
import wrapt

from rolltape.recorder import trainer
from rolltape.recorder.annotate import annotate, last_requests, remember
from rolltape.recorder.session import Session, recording
from rolltape.recorder.targets import parameters_of
from rolltape.recorder.trl_targets import TARGETS

_patches: list[tuple[Any, str, Any]] = []


class _Scoring(threading.local):
    """Inside of `_generate_and_score_completions` of this thread."""

    inside: bool = False
    rewards: Any = None


_scoring = _Scoring()


def bind() -> bool:
    """Patch TRL's GRPO trainer; called once it has been imported.

    Returns:
        Whether anything was patched.
    """
    if _patches:
        return False
    around = {
        "_get_per_token_logps_and_entropies": _around_logprobs,
        "_generate_and_score_completions": _around_scoring,
        "_calculate_rewards": _around_rewards,
    }
    for target in TARGETS:
        owner: Any = getattr(importlib.import_module(target.module), "GRPOTrainer", None)
        name = target.symbol.rpartition(".")[2]
        original = getattr(owner, "__dict__", {}).get(name)
        if original is None or set(target.parameters) - parameters_of(original):
            continue
        _patches.append((owner, name, original))
        setattr(owner, name, wrapt.FunctionWrapper(original, around[name]))
    return bool(_patches)


def unbind() -> None:
    """Undo `bind`."""
    while _patches:
        owner, name, original = _patches.pop()
        setattr(owner, name, original)


def _around_logprobs(wrapped: Any, grpo: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None:
        return wrapped(*args, **kwargs)
    given = session.safely("trl.begin", _given, wrapped, args, kwargs)
    model = None if given is None else session.safely("trl.begin", _model, grpo, given["model"])
    keep = trainer.live_routes(model) if model is not None else contextlib.nullcontext()
    with keep as routes:
        result = wrapped(*args, **kwargs)
    if given is not None and model is not None:
        session.safely("trl.logprobs", _record, session, grpo, model, given, result, routes)
    return result


def _given(wrapped: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _model(grpo: Any, model: Any) -> Any:
    return grpo.accelerator.unwrap_model(model)


def _record(
    session: Session, grpo: Any, model: Any, given: dict[str, Any], result: Any, routes: Any
) -> bool:
    logps = result[0] if isinstance(result, tuple) else result
    ids, mask, keep = given["input_ids"], given["attention_mask"], int(given["logits_to_keep"])
    prompt = ids.shape[1] - keep
    logprobs = torch.zeros(ids.shape, dtype=torch.float32, device=logps.device)
    logprobs[:, prompt:] = logps.detach().float()
    loss = mask.clone()
    loss[:, :prompt] = 0
    whole = routes.tokens == ids.numel()
    if routes.layers and not whole:
        reason = f"routes of {routes.tokens} tokens for a batch of {ids.numel()}"
        session.event("gap", detail={"table": "routes", "reason": reason})
    role, scoring = _purpose(grpo, given["model"])
    return trainer.record_logprobs(
        model,
        ids,
        logprobs,
        loss_mask=loss,
        attention_mask=mask,
        prompt_lens=mask[:, :prompt].sum(1).tolist(),
        role=role,
        scoring=scoring,
        temperature=float(getattr(grpo, "temperature", 1.0)),
        optimizer_step=int(grpo.state.global_step),
        micro_batch=int(getattr(grpo, "_step", 0)),
        routes=routes if whole else None,
    )


def _purpose(grpo: Any, model: Any) -> tuple[str, str]:
    """Role, and what the logprobs are for."""
    if model is getattr(grpo, "ref_model", None):
        return "reference", "reference"
    if not _scoring.inside:
        return "trainer", "current"
    # without a model of its own the reference is the same one with its adapter off
    shared = getattr(grpo, "ref_model", None) is None and bool(getattr(grpo, "beta", False))
    return "trainer", "old or reference" if shared else "old"


def _around_scoring(wrapped: Any, grpo: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is None:
        return wrapped(*args, **kwargs)
    remember(())  # of this call, or of none
    _scoring.inside, _scoring.rewards = True, None
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _scoring.inside = False
    session.safely("trl.rewards", _annotate, session, grpo, result)
    return result


def _around_rewards(wrapped: Any, grpo: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    _scoring.rewards = result
    return result


def _annotate(session: Session, grpo: Any, output: Any) -> bool:
    """Rewards and advantages of the rows that this process generated."""
    keys, advantages = last_requests(), output["advantages"].detach().float().cpu()
    advantages = advantages.reshape(len(advantages), -1)
    if len(keys) != len(advantages) or advantages.shape[1] != 1:
        reason = f"{len(keys)} recorded requests, advantages of shape {list(advantages.shape)}"
        session.event("gap", detail={"table": "annotations", "reason": reason})
        return False
    per_function = None
    if _scoring.rewards is not None:  # of all processes, in their order
        first = int(grpo.accelerator.process_index) * len(keys)
        per_function = _scoring.rewards.detach().float().cpu()[first : first + len(keys)]
    for i, key in enumerate(keys):
        facts: dict[str, Any] = {}
        if per_function is not None:
            weights = grpo.reward_weights.detach().float().cpu()
            facts["reward"] = float((per_function[i] * weights).nansum())
            for name, value in zip(grpo.reward_func_names, per_function[i].tolist(), strict=True):
                facts[f"reward.{name}"] = value
        annotate(key, advantage=float(advantages[i, 0]), **facts)
    return True
