"""A vLLM worker with the second model runner (`vllm.v1.worker.gpu`).

`prepare_inputs` is called for real steps and gives the batch in row order; `sample` draws. The
sampler works on copies of the logits, so what the model gave stays as it is.
"""

from __future__ import annotations

import threading
from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording
from rolltape.recorder.vllm import graphs
from rolltape.recorder.vllm.record import Recorder, recorder_of
from rolltape.recorder.vllm.worker import around_capture, around_load

_patches = Patches()


class _Sampled(threading.local):
    """What the sampler of this thread's step was given, and what truncation left of it."""

    wanted: bool = False
    logits: Any = None
    processed: Any = None


_seen = _Sampled()


def bind() -> bool:
    """Patch the runner; called once its module has been imported."""
    if _patches:
        return False
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    _patches.around(GPUModelRunner, "load_model", around_load)
    _patches.around(CudaGraphManager, "capture", graphs.around_capture)
    _patches.around(GPUModelRunner, "execute_model", _around_execute)
    _patches.around(GPUModelRunner, "prepare_inputs", _around_inputs)
    _patches.around(GPUModelRunner, "sample", _around_sample)
    _patches.around(Sampler, "sample", _around_sampler)
    _patches.around(BaseRouter, "set_capture_fn", around_capture)
    return True


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


def _around_execute(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    recorder = None
    if session is not None and not kwargs.get("dummy_run"):
        recorder = session.safely("vllm.load", recorder_of, session, runner)
    if session is None or recorder is None:
        return wrapped(*args, **kwargs)
    scheduled = args[0] if args else kwargs.get("scheduler_output")
    recorder.guard("vllm.schedule", recorder.schedule, scheduled)
    result = wrapped(*args, **kwargs)
    if result is not None:
        recorder.guard("vllm.step", recorder.finish)
    else:
        recorder.guard("vllm.routes", recorder.take_routes)
    return result


def _around_inputs(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    batch = wrapped(*args, **kwargs)
    recorder: Recorder | None = getattr(runner, "_rolltape", None)
    if recorder is not None and recorder.going:
        recorder.guard("vllm.rows", _rows, recorder, batch)
    return batch


def _rows(recorder: Recorder, batch: Any) -> None:
    import numpy as np

    n = batch.num_reqs
    drafts = recorder.scheduled.scheduled_spec_decode_tokens
    ids = list(batch.req_ids[:n])
    recorder.launch(
        ids,
        np.array(batch.num_computed_tokens_np[:n], np.int64),
        np.array(batch.num_scheduled_tokens[:n], np.int64),
        np.array([len(drafts.get(name, ())) for name in ids], np.int64) if drafts else None,
    )
    padded = getattr(batch, "num_tokens_after_padding", None)
    recorder.padded = None if padded is None else int(padded)


def _around_sampler(wrapped: Any, sampler: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if _seen.wanted:
        _seen.logits = args[0] if args else kwargs.get("logits")
        _seen.processed = result[1]
    return result


def _around_sample(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    recorder: Recorder | None = getattr(runner, "_rolltape", None)
    if recorder is None or not recorder.going:
        return wrapped(*args, **kwargs)
    _seen.wanted, _seen.logits, _seen.processed = True, None, None
    try:
        result = wrapped(*args, **kwargs)
    finally:
        logits, processed = _seen.logits, _seen.processed
        _seen.wanted, _seen.logits, _seen.processed = False, None, None
    batch = args[1] if len(args) > 1 else kwargs.get("input_batch")
    recorder.guard("vllm.tokens", _after, recorder, runner, batch, result[0], logits, processed)
    return result


def _after(
    recorder: Recorder, runner: Any, batch: Any, output: Any, logits: Any, processed: Any
) -> None:
    import torch

    recorder.before_sampling(logits, in_place=False)
    lives = recorder.lives
    warm = [1.0 if life.greedy else life.temperature or 1.0 for life in lives]
    temperature = torch.tensor(warm, dtype=torch.float32).to(recorder.device, non_blocking=True)
    mode = getattr(runner.model_config, "logprobs_mode", None)
    kind = {"raw_logprobs": "raw", "processed_logprobs": "processed"}.get(mode or "")
    scores = output.logprobs_tensors
    own = None
    if scores is not None and kind and scores.logprobs.ndim == 2 and len(scores.logprobs):
        own = scores.logprobs[:, 0]
    token = output.sampled_token_ids
    if token.shape[0] != len(lives):  # verified drafts stand in rows of their own
        token = None
    if token is not None:
        recorder.sampled(token, processed, temperature, own, kind if own is not None else None)
    recorder.finish()
