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
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from rolltape.recorder import trainer
from rolltape.recorder.adapters import adapters_in_force
from rolltape.recorder.annotate import annotate, last_requests, remember
from rolltape.recorder.patches import Patches
from rolltape.recorder.session import Session, recording
from rolltape.recorder.targets import parameters_of
from rolltape.recorder.trl_targets import TARGETS
from rolltape.store import token_digest

_patches = Patches()


class _Scoring(threading.local):
    """Inside of `_generate_and_score_completions` of this thread."""

    inside: bool = False
    rewards: Any = None


_scoring = _Scoring()


@dataclass
class _Progress:
    """Of one trainer; the same in all processes that train together."""

    optimizer_step: int = -1
    first_micro_batch: int = 0  # of that step, as TRL counts them
    generations: int = 0

    def micro_batch(self, optimizer_step: int, count: int) -> int:
        """Number of a micro-batch within its optimizer step."""
        if optimizer_step != self.optimizer_step:
            self.optimizer_step, self.first_micro_batch = optimizer_step, count
        return count - self.first_micro_batch


_progress: weakref.WeakKeyDictionary[Any, _Progress] = weakref.WeakKeyDictionary()


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
        known = parameters_of(getattr(owner, name, None))
        if owner is not None and not set(target.parameters) - known:
            _patches.around(owner, name, around[name], inherited=True)
    return bool(_patches)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


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
    logprobs = torch.zeros(ids.shape, dtype=logps.dtype, device=logps.device)
    logprobs[:, prompt:] = logps.detach()
    loss = mask.clone()
    loss[:, :prompt] = 0
    whole = routes.tokens == ids.numel()
    if routes.layers and not whole:
        reason = f"routes of {routes.tokens} tokens for a batch of {ids.numel()}"
        session.event("gap", detail={"table": "routes", "reason": reason})
    role, scoring = _purpose(grpo, given["model"], model)
    step = int(grpo.state.global_step)
    progress = _progress.setdefault(grpo, _Progress())
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
        optimizer_step=step,
        micro_batch=progress.micro_batch(step, int(getattr(grpo, "_step", 0))),
        routes=routes if whole else None,
        facts={"autocast": str(getattr(grpo.accelerator, "mixed_precision", None) or "no")},
    )


def _purpose(grpo: Any, given: Any, model: Any) -> tuple[str, str]:
    """Role, and what the logprobs are for."""
    if given is getattr(grpo, "ref_model", None):
        return "reference", "reference"
    if not _scoring.inside:
        return "trainer", "current"
    # without a model of its own the reference is the same one with its adapters off, or with the
    # copy that TRL makes of one that is trained further
    in_force = adapters_in_force(model)
    if in_force and frozenset().union(*(s.active for s in in_force.values())) <= {"ref"}:
        return "reference", "reference"
    return "trainer", "old"


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
    """Groups, rewards and advantages of the rows that this process generated."""
    keys, advantages = last_requests(), output["advantages"].detach().float().cpu()
    advantages = advantages.reshape(len(advantages), -1)
    progress = _progress.setdefault(grpo, _Progress())
    progress.generations += 1
    if len(keys) != len(advantages) or advantages.shape[1] != 1:
        reason = f"{len(keys)} recorded requests, advantages of shape {list(advantages.shape)}"
        session.event("gap", detail={"table": "annotations", "reason": reason})
        return False
    first = int(grpo.accelerator.process_index) * len(keys)  # of all processes, in their order
    per_function = None
    if _scoring.rewards is not None:
        per_function = _scoring.rewards.detach().float().cpu()[first : first + len(keys)]
    call = f"{int(grpo.state.global_step)}.{progress.generations - 1}"
    samples = _samples(grpo)
    for i, key in enumerate(keys):
        facts: dict[str, Any] = {}
        if per_function is not None:
            weights = grpo.reward_weights.detach().float().cpu()
            facts["reward"] = float((per_function[i] * weights).nansum())
            for name, value in zip(grpo.reward_func_names, per_function[i].tolist(), strict=True):
                facts[f"reward.{name}"] = value
        if samples:
            # a group may lie across processes, and its prompt may come again in a later call
            prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].cpu().numpy()
            digest = token_digest(len(prompt), prompt)[:8]
            facts["group"] = f"grpo-{call}-{(first + i) // samples}-{digest}"
        annotate(key, advantage=float(advantages[i, 0]), **facts)
    return True


def _samples(grpo: Any) -> int:
    """Samples of a prompt in the present call; 0 if that is not known."""
    name = "num_generations" if grpo.model.training else "num_generations_eval"
    return int(getattr(grpo, name, 0) or 0)
