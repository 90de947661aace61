"""What the tests of the TensorRT-LLM double share: short names, and the model without the engine.

`tensorrt_llm` is imported inside of functions: it is the double only while a test runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

MODEL = "tiny"
PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
    [11, 12, 13],
    [5, 6, 7, 8, 9, 10, 11, 12, 20, 21],
    [30, 31, 32, 33, 34],
]
TOKENS = 10

VARIANTS = {
    "overlap": {},
    "no overlap": {"disable_overlap_scheduler": True},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_tokens": 8},
    "chunked experts": {"moe": {"max_num_tokens": 3}},
    "no reuse": {"kv": {"enable_block_reuse": False}},
    "graphs": {"graph": {"batch_sizes": [1, 2, 4, 8], "enable_padding": True}},
    "padded graphs": {"graph": {"batch_sizes": [3, 8], "enable_padding": True}},
    "chunked experts in graphs": {
        "graph": {"batch_sizes": [8], "enable_padding": True},
        "moe": {"max_num_tokens": 3},
    },
    "few blocks": {"kv": {"max_tokens": 64}},
    "few blocks, no overlap": {"kv": {"max_tokens": 64}, "disable_overlap_scheduler": True},
    "attention DP": {"enable_attention_dp": True},
}


def params(**kwargs: Any) -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **kwargs})


def truth() -> Any:
    from tensorrt_llm._double_truth import TRUTH

    return TRUTH


def args(**kwargs: Any) -> dict[str, Any]:
    """Arguments of an LLM from short names."""
    from tensorrt_llm import llmapi

    short = {
        "kv": ("kv_cache_config", llmapi.KvCacheConfig),
        "graph": ("cuda_graph_config", llmapi.CudaGraphConfig),
        "moe": ("moe_config", llmapi.MoeConfig),
    }
    return {
        short[name][0] if name in short else name: short[name][1](**value)
        if name in short
        else value
        for name, value in kwargs.items()
    }


class Plain:
    """The same model, without the engine: one sequence, all of it in one forward."""

    def __init__(self) -> None:
        from tensorrt_llm import _double_model as model

        config = model.read_config(MODEL)
        self.metadata = model.AttentionMetadata
        self.known: dict[tuple[int, ...], list[int]] = {}
        self.model = model.DoubleForCausalLM(config, model.plain_mapping())
        self.model.load_weights(model.make_weights(MODEL, self.model))

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [tokens, vocabulary] and experts [tokens, layers, k]."""
        where = torch.arange(len(tokens))
        shape = (len(tokens), 2, 16)
        metadata = self.metadata(
            slots=where,
            keys=where.expand(len(tokens), -1),
            positions=where,
            last=where,
            cache=[(torch.zeros(shape), torch.zeros(shape)) for _ in range(4)],
        )
        ids = torch.tensor(tokens)
        logits = self.model.forward(attn_metadata=metadata, input_ids=ids, position_ids=where)
        used = [ids for _, ids in sorted(self.model.used, key=lambda entry: entry[0])]
        return logits, torch.stack(used, 1)

    def greedy(self, prompt: list[int], tokens: int = TOKENS) -> list[int]:
        known = self.known.setdefault(tuple(prompt), [])
        while len(known) < tokens:
            known.append(int(self.run(prompt + known)[0][-1].argmax()))
        return known[:tokens]


def assert_complete(output: Any, prompt: list[int], plain: Plain) -> None:
    """The log has every position of a sequence, drawn once, with the experts of a plain forward.

    Positions below `cached_tokens` were taken over: they may stand in the log of others only.
    """
    client, tokens = output.request_id, output.outputs[0].token_ids
    sequence = prompt + tokens
    draws = truth().drawn(client)
    assert [(d.position, d.token) for d in draws] == list(enumerate(sequence))[len(prompt) :]
    routes = truth().routes(client)
    wanted = set(range(output.cached_tokens, len(sequence) - 1))
    assert wanted <= set(routes) <= set(range(len(sequence)))
    _, experts = plain.run(sequence)
    for position in wanted:
        for _, found in routes[position]:
            assert torch.equal(found, experts[position].long())


def worker_environment(worker: Any) -> dict[str, str]:
    """Called in the worker: its environment, and which engine variables it was started with."""
    started = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = [entry.partition(b"=")[0].decode() for entry in started]
    own = [name for name in names if name.startswith(("TLLM", "TRTLLM"))]
    return {**os.environ, "at start": json.dumps(own)}
