"""A vLLM worker with the first model runner: what ran, with which routes, and what was drawn.

`execute_model` tells the schedule, `_model_forward` is called for real steps only, `_sample` draws.
Routes are written by a hook that is nothing but a copy into a fixed buffer, so that a CUDA graph or
a compiled module repeats it; everything leaves the device on a stream of its own.
"""

from __future__ import annotations

import threading
from typing import Any

from rolltape.recorder.patches import Patches
from rolltape.recorder.session import recording
from rolltape.recorder.vllm import graphs
from rolltape.recorder.vllm.record import Recorder, recorder_of, writes_routes

_patches = Patches()


class _Masked(threading.local):
    """Logits after truncation of the step that this thread samples; set while it does."""

    wanted: bool = False
    logits: Any = None


masked = _Masked()


def bind() -> bool:
    """Patch the runner; called once its module has been imported."""
    import vllm.v1.sample.ops.topk_topp_sampler as cut
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not _patches.around(GPUModelRunner, "execute_model", _around_execute):
        return False
    _patches.around(GPUModelRunner, "_model_forward", _around_forward)
    _patches.around(GPUModelRunner, "_sample", _around_sample)
    _patches.around(GPUModelRunner, "_get_prompt_logprobs_dict", _around_prompts)
    _patches.around(GPUModelRunner, "load_model", around_load)
    _patches.around(GPUModelRunner, "_dummy_run", graphs.around_dummy)
    _patches.around(BaseRouter, "set_capture_fn", around_capture)
    _patches.around(cut, "apply_top_k_top_p", around_cut)
    return True


def bind_cpu() -> bool:
    """Patch what the CPU runner overrides."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return _patches.around(CPUModelRunner, "load_model", around_load)


def bind_worker() -> bool:
    """Patch how a worker ends, so that its last rows are written before it is gone."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return _patches.around(WorkerWrapperBase, "shutdown", _around_shutdown)


def unbind() -> None:
    """Undo `bind` and its companions."""
    _patches.undo()


def around_load(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    """The model is there: its recorder is made before anything is compiled or captured."""
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is not None:
        session.safely("vllm.load", recorder_of, session, runner)
    return result


def _around_shutdown(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    if session is not None:
        session.safely("vllm.shutdown", session.commit)
    return wrapped(*args, **kwargs)


def around_capture(wrapped: Any, router: Any, args: Any, kwargs: Any) -> Any:
    """The engine takes the one slot of a router: ours stays behind it."""
    ours = writes_routes(router)
    if ours is None:
        return wrapped(*args, **kwargs)
    theirs = args[0] if args else kwargs.get("capture_fn")
    if theirs is None or theirs is ours:
        return wrapped(ours)

    def both(topk_ids: Any) -> None:
        theirs(topk_ids)
        ours(topk_ids)

    return wrapped(both)


def around_cut(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """What top-k and top-p left."""
    result = wrapped(*args, **kwargs)
    if masked.wanted:
        masked.logits = result
    return result


def _around_execute(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    session = recording()
    recorder = None
    if session is not None:
        recorder = session.safely("vllm.load", recorder_of, session, runner)
    if session is None or recorder is None:
        return wrapped(*args, **kwargs)
    scheduled = args[0] if args else kwargs.get("scheduler_output")
    recorder.guard("vllm.schedule", recorder.schedule, scheduled)
    result = wrapped(*args, **kwargs)
    if result is not None:  # nothing will be sampled: another stage does, or nothing ran
        recorder.guard("vllm.step", recorder.finish)
    return result


def _around_forward(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    recorder: Recorder | None = getattr(runner, "_rolltape", None)
    if recorder is None or not recorder.going:
        return wrapped(*args, **kwargs)
    recorder.guard("vllm.rows", _rows, recorder, runner, kwargs)
    result = wrapped(*args, **kwargs)
    recorder.guard("vllm.routes", recorder.take_routes)
    return result


def _rows(recorder: Recorder, runner: Any, kwargs: Any) -> None:
    """The batch as the runner laid it out; its order is not that of the scheduler."""
    import numpy as np

    batch, scheduled = runner.input_batch, recorder.scheduled
    ids = batch.req_ids[: batch.num_reqs]
    drafts, counts = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
    if scheduled.total_num_scheduled_tokens == len(ids):  # a token each
        n = np.ones(len(ids), np.int64)
    else:
        n = np.array([counts[name] for name in ids], np.int64)
    recorder.launch(
        ids,
        np.array(batch.num_computed_tokens_cpu[: batch.num_reqs], np.int64),
        n,
        np.array([len(drafts.get(name, ())) for name in ids], np.int64) if drafts else None,
    )
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is not None:
        recorder.padded = int(tokens.shape[0])


def _around_sample(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    recorder: Recorder | None = getattr(runner, "_rolltape", None)
    if recorder is None or not recorder.going:
        return wrapped(*args, **kwargs)
    logits = args[0] if args else kwargs.get("logits")
    recorder.guard("vllm.logits", recorder.before_sampling, logits, True)
    masked.wanted, masked.logits = recorder.wants_masked, None
    try:
        result = wrapped(*args, **kwargs)
    finally:
        cut, masked.wanted, masked.logits = masked.logits, False, None
    recorder.guard("vllm.tokens", _after_sampling, recorder, runner, result, cut)
    return result


def _after_sampling(recorder: Recorder, runner: Any, output: Any, cut: Any) -> None:
    metadata = runner.input_batch.sampling_metadata
    own, kind = None, None
    logprobs = output.logprobs_tensors
    if logprobs is not None and metadata.max_num_logprobs not in (None, -1):
        kind = {"raw_logprobs": "raw", "processed_logprobs": "processed"}.get(
            runner.model_config.logprobs_mode
        )
        own = logprobs.logprobs[:, 0] if kind else None
    recorder.sampled(output.sampled_token_ids, cut, metadata.temperature, own, kind)
    recorder.finish()


def _around_prompts(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    recorder: Recorder | None = getattr(runner, "_rolltape", None)
    if recorder is not None and result:
        recorder.guard("vllm.prompts", recorder.scored, result)
    return result
