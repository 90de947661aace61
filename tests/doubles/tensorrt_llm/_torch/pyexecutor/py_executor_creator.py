"""Puts an executor together."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._double_bindings import Request, SamplingConfig
from tensorrt_llm._double_memory import KVCacheManager, ResourceManager, Scheduler, SeqSlotManager
from tensorrt_llm._double_model import plain_mapping
from tensorrt_llm._double_sampler import TorchSampler
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.route_capture import RouteCapture


def create_py_executor(
    llm_args: Any, checkpoint_dir: str | None = None, tokenizer: Any = None
) -> PyExecutor:
    """Loads the model, measures memory with requests of its own, warms up, and starts.

    With attention DP the rank believes that it is the first of two; `dist` answers for the other
    one with the values of this one.
    """
    if os.getenv("FORCE_DETERMINISTIC", "0") == "1":
        llm_args.kv_cache_config.enable_block_reuse = False
    mapping = plain_mapping()
    if llm_args.enable_attention_dp:
        mapping.enable_attention_dp, mapping.tp_size = True, 2
    dist = SimpleNamespace(
        rank=0, tp_size=mapping.tp_size, mapping=mapping, tp_allgather=lambda value: [value] * 2
    )
    engine = PyTorchModelEngine(
        model_path=checkpoint_dir or llm_args.model,
        pytorch_backend_config=llm_args,
        checkpoint_loader=None,
        batch_size=llm_args.max_batch_size,
        max_num_tokens=llm_args.max_num_tokens,
        max_seq_len=llm_args.max_seq_len,
        mapping=mapping,
        dist=dist,
    )
    capture = llm_args.enable_return_routed_experts
    RouteCapture.create(rank=0, model_engine=engine, enabled=capture)
    _double_measure(engine, llm_args, dist)
    executor = _double_executor(engine, llm_args, dist)
    engine.warmup(executor.resource_manager)
    executor.start_worker()
    return executor


def _double_executor(engine: Any, args: Any, dist: Any) -> PyExecutor:
    cache, size = args.kv_cache_config, args.kv_cache_config.tokens_per_block
    tokens = cache.max_tokens or args.max_batch_size * (engine.max_seq_len + size)
    kv = KVCacheManager(engine.model.config, tokens // size, size, cache.enable_block_reuse)
    # a slot is freed one iteration after the batch that still holds it
    slots = SeqSlotManager(2 * args.max_batch_size)
    return PyExecutor(
        ResourceManager(kv, slots),
        Scheduler(kv, args),
        engine,
        TorchSampler(2 * args.max_batch_size, engine.max_seq_len),
        dist,
        disable_overlap_scheduler=args.disable_overlap_scheduler,
        max_input_len=engine.max_seq_len,
        max_batch_size=args.max_batch_size,
        start_worker=False,
    )


def _double_measure(engine: Any, args: Any, dist: Any) -> None:
    """Dummy requests through a first executor, which says that it warms up, as the engine does."""
    executor = _double_executor(engine, args, dist)
    executor.is_warmup = True
    with engine.no_cuda_graph():
        executor.start_worker()
        names = executor.enqueue_requests([_double_request() for _ in range(2)])
        executor.await_responses(names)
        executor.shutdown()
    executor.is_warmup = False


def _double_request() -> Request:
    return Request(
        client_id=0,
        input_token_ids=[1, 1, 1],
        max_tokens=2,
        streaming=False,
        sampling_config=SamplingConfig(),
        end_id=None,
        stop_words=[],
        return_log_probs=False,
        return_context_logits=False,
    )
