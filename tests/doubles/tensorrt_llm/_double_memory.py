"""Blocks of keys and values, slots of sequences, and which requests fit.

Blocks that a finished request leaves keep their contents until somebody needs them; a prompt that
begins with the same tokens takes whole blocks over, all but its last token at most.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from tensorrt_llm._double_bindings import LlmRequestState, SamplingConfig
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.scheduler.scheduler import ScheduledRequests


class KVCacheManager:
    """Args: config of the model; blocks; tokens a block; whether prefixes are taken over."""

    event_buffer_max_size = 0

    def __init__(self, config: Any, num_blocks: int, tokens_per_block: int, reuse: bool) -> None:
        self.tokens_per_block, self.enable_block_reuse = tokens_per_block, reuse
        size = config.hidden_size // config.num_attention_heads
        shape = (num_blocks * tokens_per_block, config.num_attention_heads, size)
        with torch.inference_mode(False):
            layers = range(config.num_hidden_layers)
            self.cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in layers]
        self.tables: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._users = [0] * num_blocks
        self._key: dict[int, tuple[int, ...]] = {}
        self._block: dict[tuple[int, ...], int] = {}

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def missing(self, request: Any, tokens: int) -> int:
        """Blocks that a request lacks to hold so many tokens."""
        return self.blocks_for(tokens) - len(self.tables.get(request.py_request_id, ()))

    def held_alone(self, request: Any) -> int:
        """Blocks that come free when a request gives up its place."""
        return sum(self._users[b] == 1 for b in self.tables.get(request.py_request_id, ()))

    def add_sequence(self, request: Any) -> None:
        """Give a request its blocks, those of a known prefix first."""
        table = self.tables[request.py_request_id] = []
        tokens, size = request.get_tokens(0), self.tokens_per_block
        for end in range(size, request.prompt_len, size):  # the last token is always run
            block = self._block.get(tuple(tokens[:end])) if self.enable_block_reuse else None
            if block is None:
                break
            self._take(block)
            table.append(block)
        request.prepopulated_prompt_len = reused = len(table) * size
        if reused:
            remaining = request.prompt_len - reused
            chunk = request.context_chunk_size
            whole = request.context_current_position + chunk == request.prompt_len
            request.context_current_position = reused
            request.context_chunk_size = remaining if whole else min(chunk, remaining)
        request.cached_tokens = reused
        self.extend(request, request.prompt_len + 1)

    def extend(self, request: Any, tokens: int) -> None:
        """Give a request what it lacks to hold so many tokens."""
        for _ in range(max(self.missing(request, tokens), 0)):
            block = next(iter(self._free))
            self._take(block)
            key = self._key.pop(block, None)
            if key is not None:
                del self._block[key]
            self.tables[request.py_request_id].append(block)

    def store(self, request: Any, tokens: int) -> None:
        """Let others take over the whole blocks of the first tokens of a request."""
        ids, size = request.get_tokens(0), self.tokens_per_block
        for index, block in enumerate(self.tables.get(request.py_request_id, ())):
            end = (index + 1) * size
            key = tuple(ids[:end])
            if self.enable_block_reuse and end <= tokens and key not in self._block:
                self._block[key], self._key[block] = block, key

    def free_resources(self, request: Any) -> None:
        """Take the blocks back; those that were run stay known."""
        context = request.context_remaining_length > 0
        run = request.context_current_position if context else request.max_beam_num_tokens - 1
        if not request.is_dummy:
            self.store(request, run)
        for block in self.tables.pop(request.py_request_id, ()):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def reset_reuse_state(self) -> None:
        self._key.clear()
        self._block.clear()

    def rows(self, request: Any, longest: int) -> torch.Tensor:
        """int64 [longest]: rows of the cache by position; 0 where there is none."""
        size = self.tokens_per_block
        table = torch.tensor(self.tables[request.py_request_id])
        known = (table[:, None] * size + torch.arange(size)).flatten()[:longest]
        return torch.nn.functional.pad(known, (0, longest - len(known)))

    def add_dummy_requests(
        self,
        request_ids: list[int],
        token_nums: list[int] | None = None,
        is_gen: bool = False,
    ) -> list[LlmRequest]:
        found = []
        for index, name in enumerate(request_ids):
            tokens = token_nums[index] if token_nums else 1
            request = LlmRequest(name, 1, [1] * tokens, SamplingConfig())
            request.is_dummy_request = True
            if is_gen:
                request.state = LlmRequestState.GENERATION_IN_PROGRESS
                request.context_current_position = request.prompt_len = tokens
            self.tables[name] = []
            self.extend(request, tokens + 1)
            found.append(request)
        return found

    def shutdown(self) -> None:
        self.tables.clear()

    def _take(self, block: int) -> None:
        self._free.pop(block, None)
        self._users[block] += 1


class SeqSlotManager:
    """Numbers below the largest batch for the sequences that run."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))

    def take(self, request: Any) -> None:
        if request.py_seq_slot is None:
            request.py_seq_slot = request.seq_slot = self._free.pop(0)

    def free_resources(self, request: Any) -> None:
        if request.py_seq_slot is not None:
            self._free.append(request.py_seq_slot)
            request.py_seq_slot = request.seq_slot = None
            request.py_batch_idx = None

    def shutdown(self) -> None:
        pass


class ResourceManager:
    def __init__(self, kv: KVCacheManager, slots: SeqSlotManager) -> None:
        self.kv, self.slots = kv, slots
        self.resource_managers = {"kv_cache_manager": kv, "seq_slot_manager": slots}

    def get_resource_manager(self, name: str) -> Any:
        return self.resource_managers.get(name)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            if request.py_request_id not in self.kv.tables:
                self.kv.add_sequence(request)
            self.slots.take(request)
        # reuse may have made the first chunk the last one
        scheduled_batch.reset_context_requests(scheduled_batch.context_requests)
        for request in scheduled_batch.generation_requests:
            self.kv.extend(request, request.max_beam_num_tokens + 2)
            self.slots.take(request)

    def update_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            if request.context_remaining_length == 0 and not request.is_finished:
                self.kv.store(request, request.prompt_len)

    def free_resources(self, request: Any) -> None:
        self.kv.free_resources(request)
        self.slots.free_resources(request)


class Scheduler:
    """Decode rows first, then chunks of prompts, in the order in which they came.

    Where blocks are short, the youngest decode rows are paused; nothing new is begun then.
    """

    def __init__(self, kv: KVCacheManager, args: Any) -> None:
        self.kv, self.args = kv, args

    def schedule_request(self, active: list[Any]) -> ScheduledRequests:
        batch, free = ScheduledRequests(), self.kv.get_num_free_blocks()
        running = [r for r in active if r.state is LlmRequestState.GENERATION_IN_PROGRESS]
        budget = self.args.max_num_tokens
        while running:
            request = running.pop(0)
            lacks = max(self.kv.missing(request, request.max_beam_num_tokens + 2), 0)
            while lacks > free and running:
                victim = running.pop()
                batch.paused_requests.append(victim)
                free += self.kv.held_alone(victim)
            if lacks > free:
                batch.paused_requests.append(request)
                free += self.kv.held_alone(request)
                continue
            free -= lacks
            budget -= 1
            batch.append_generation_request(request)
        if not batch.paused_requests:
            self._contexts(batch, active, budget, free)
        return batch

    def _contexts(self, batch: Any, active: list[Any], budget: int, free: int) -> None:
        seats = self.args.max_batch_size - sum(r.py_seq_slot is not None for r in active)
        for request in active:
            if request.state is not LlmRequestState.CONTEXT_INIT:
                continue
            new = request.py_request_id not in self.kv.tables
            lacks = self.kv.missing(request, request.prompt_len + 1) if new else 0
            if lacks > free or (new and not seats):
                break
            chunk = remaining = request.context_remaining_length
            if self.args.enable_chunked_prefill and remaining > budget:
                chunk = budget // self.kv.tokens_per_block * self.kv.tokens_per_block
            if not 0 < chunk <= budget:
                break
            request.context_chunk_size = chunk
            batch.append_context_request(request)
            free, budget, seats = free - lacks, budget - chunk, seats - new
