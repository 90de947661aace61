"""Has the loop of TensorRT-LLM's PyTorch back end run a script: which requests, and which tokens.

The engine schedules itself. What it is shown is limited to the requests that the recording had in
flight at that step, so it is their chunks, pauses and row order that come out; where they do not,
the loop is stopped behind the first such step. Drawn tokens are replaced behind `sample_async`,
on the device (the next step reads them there) and in the copy that requests are updated from:
shapes and kernels stay as they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolltape.recorder.patches import Patches
from rolltape.recorder.tensorrt_llm.schedule import SAMPLE, is_dummy, request_id
from rolltape.replay.serving_steps import Step
from rolltape.store import UsageError
from rolltape.store.keys import Key

#: A request of the loop: id that the front end gave it, index among its samples.
Place = tuple[int, int]
#: A forced token with its logprob; None where the engine drew it itself.
Own = tuple[int, float] | None
#: Iterations in a row that may run nothing although something is due.
_MOST_EMPTY = 64
#: Iterations that apply what the last forwards drew, before requests are taken away.
_LAST_EMPTY = 3


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What one sequence is given, and how it is sampled.

    Args:
        tokens: prompt and response.
        sampling: resolved settings, by the recorder's names.
    """

    tokens: np.ndarray
    sampling: Mapping[str, Any]


@dataclass(kw_only=True)
class Script:
    """What the loop is to do until everything in it has ended.

    Args:
        sequences: by place; those without tokens to force are None.
        keys: place -> sequence of the recording; empty if there are no steps.
        steps: in this order; None runs freely, but begins when all requests are there.
        aborted: sequences that were cancelled while the last of their steps ran.
    """

    sequences: Mapping[Place, Forced | None]
    keys: Mapping[Place, Key]
    steps: Sequence[Step] | None = None
    aborted: frozenset[Key] = frozenset()

    def __post_init__(self) -> None:
        self.first: dict[Key, int] = {}
        self.last: dict[Key, int] = {}
        for index, step in enumerate(self.steps or ()):
            for part in step.parts:
                self.first.setdefault(part.key, index)
                self.last[part.key] = index


class Loop:
    """The loop of one `PyExecutor` in this process.

    Args:
        executor: which; it must be idle.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._patches = Patches()
        self._script: Script | None = None
        self._go = threading.Event()
        self._index = self._empty = 0
        self._over = False
        self._seen: set[Place] = set()
        self._cancelled: set[int] = set()
        self._next: dict[int, int] = {}  # position that a request draws next, by its id
        self._own: dict[int, tuple[Any, deque[Own]]] = {}  # by id of a `py_result`, and that itself
        #: forwards with something else than padding
        self.forwards = 0
        #: whether a step was composed otherwise than the recorded one, or did not come
        self.broken = False
        #: logprobs that were not computed by the engine: of tokens that it did not draw
        self.computed = 0
        self.problem: BaseException | None = None
        from tensorrt_llm._torch.pyexecutor import llm_request, py_executor

        loop = py_executor.PyExecutor
        for owner, name, wrapper in (
            (loop, "_schedule", self._around_schedule),
            (loop, "_sample_async", self._around_sample),
            (llm_request.PyResult, "append_log_probs", self._around_logprobs),
        ):
            if not self._patches.around(owner, name, wrapper):
                self._patches.undo()
                raise UsageError(f"this TensorRT-LLM has no {owner.__name__}.{name} to drive it by")

    @property
    def ended(self) -> bool:
        """Whether the engine has nothing to run of what was handed in."""
        script = self._script
        there = script is None or set(script.sequences) <= self._seen
        return not self._executor.active_requests and (there or self.broken)

    def close(self) -> None:
        """Undo the patches."""
        self._go.set()
        self._patches.undo()

    def hold(self) -> None:
        """Let nothing run until `begin`."""
        self._go.clear()

    def begin(self, script: Script) -> None:
        """Everything of a script was handed in: run it."""
        self._script = script
        self._index = self._empty = 0
        self._over = False
        self._seen, self._cancelled = set(), set()
        self._own.clear()
        self._go.set()

    # -- which requests -------------------------------------------------------------------

    def _around_schedule(self, wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        if executor is not self._executor:
            return wrapped(*args, **kwargs)
        self._go.wait()
        return self._guarded(self._schedule, wrapped, args, kwargs)

    def _schedule(self, wrapped: Any, args: Any, kwargs: Any) -> Any:
        executor = self._executor
        everyone = executor.active_requests
        shown = self._shown(everyone)
        executor.active_requests = presented = list(shown)
        try:
            answer = wrapped(*args, **kwargs)
        finally:
            left = {id(request) for request in executor.active_requests}
            gone = {id(request) for request in presented} - left
            everyone[:] = [request for request in everyone if id(request) not in gone]
            executor.active_requests = everyone
        ran = bool(answer[0] is not None and answer[0].batch_size)
        self._empty = 0 if ran else self._empty + 1
        if self._empty > _MOST_EMPTY and everyone:
            self._over = self.broken = True
        if self._over and self._empty >= _LAST_EMPTY:
            self._cancel([request for request in everyone if not is_dummy(request)])
        elif ran and self._script is not None and self._script.steps:
            self._cancel_before(self._index + 1)
        return answer

    def _shown(self, everyone: Sequence[Any]) -> list[Any]:
        """The requests that the scheduler may choose from now."""
        script, executor = self._script, self._executor
        places = {id(request): place_of(request) for request in everyone}
        self._seen |= set(places.values())
        if script is None:
            return list(everyone)
        if script.steps is None:
            most = getattr(executor, "max_num_active_requests", None) or len(script.sequences)
            there = len(script.sequences.keys() & self._seen)
            return list(everyone) if there >= min(most, len(script.sequences)) else []
        if self._over or self._index >= len(script.steps):
            self._over = True
            return []
        now = self._index
        keys = {place: key for place, key in script.keys.items() if key in script.first}
        begun = {p for p, key in keys.items() if script.first[key] <= now <= script.last[key]}
        if not begun <= self._seen or self._must_settle(script.steps[now]):
            return []
        if now == 0 and self._cancel_before(0):
            return []
        return [request for request in everyone if places[id(request)] in begun]

    def _must_settle(self, step: Step) -> bool:
        """Whether nothing ran when the requests of a step came, and their prefixes were known."""
        fresh = all(self._script_first(part.key) == self._index for part in step.parts)
        known = any(part.start > 0 for part in step.parts)
        return fresh and known and getattr(self._executor, "previous_batch", None) is not None

    def _script_first(self, key: Key) -> int | None:
        return None if self._script is None else self._script.first.get(key)

    def _cancel_before(self, index: int) -> bool:
        """Cancel what had to leave while step `index` ran: the loop takes notice one later.

        Returns:
            Whether there was something that had not been cancelled yet.
        """
        script = self._script
        assert script is not None
        clients = {
            place[0]
            for place, key in script.keys.items()
            if key in script.aborted and script.last.get(key) == index
        }
        waiting = [r for r in self._executor.active_requests if place_of(r)[0] in clients]
        return self._cancel(waiting)

    def _cancel(self, requests: Sequence[Any]) -> bool:
        before = len(self._cancelled)
        for request in requests:
            name = request_id(request)
            if getattr(request, "is_child", False):
                name = int(request.parent_request_id)
            if name not in self._cancelled:
                self._cancelled.add(name)
                self._executor.cancel_request(name)
        return len(self._cancelled) > before

    # -- what ran -------------------------------------------------------------------------

    def _note(self, batch: Any) -> None:
        """Count the step, follow the positions, and stop where it is not the recorded one."""
        parts: dict[Place, tuple[int, int]] = {}
        for request in batch.context_requests:
            start, n = int(request.context_current_position), int(request.context_chunk_size)
            parts[place_of(request)] = (start, n)
            self._next[request_id(request)] = start + n
        for request in batch.generation_requests:
            if is_dummy(request):
                continue
            at = self._next[request_id(request)]
            parts[place_of(request)] = (at, 1)
            self._next[request_id(request)] = at + 1
        if not parts:
            return
        self.forwards += 1
        script = self._script
        if script is None or script.steps is None or self._index >= len(script.steps):
            return
        step = script.steps[self._index]
        self._index += 1
        found = {script.keys.get(place): part for place, part in parts.items()}
        if found != {part.key: (part.start, part.n) for part in step.parts}:
            self._over = self.broken = True

    # -- which tokens ---------------------------------------------------------------------

    def _around_sample(self, wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        if executor is not self._executor:
            return wrapped(*args, **kwargs)
        batch = args[0] if args else kwargs["scheduled_batch"]
        self._guarded(self._note, batch)  # before the loop moves chunks on
        state = wrapped(*args, **kwargs)
        if state is None or self._script is None:
            return state
        outputs = args[1] if len(args) > 1 else kwargs["batch_outputs"]
        self._guarded(self._force, state, batch, outputs["logits"])
        return state

    @torch.no_grad()
    def _force(self, state: Any, batch: Any, logits: torch.Tensor) -> None:
        """Put the recorded tokens where the drawn ones are."""
        event = getattr(state, "sampler_event", None)
        if event is not None:
            event.synchronize()  # else the copy to the host may come after ours
        host = getattr(state, "host", None)
        drawn = state.device.new_tokens.cpu()
        for request, row in _drawing(batch):
            slot, place = request.py_seq_slot, place_of(request)
            token = int(_at(drawn, slot))
            wanted = self._wanted(place, self._next[request_id(request)])
            mine: Own = None
            if wanted is not None and wanted != token:
                for tokens in (state.device, host):
                    if tokens is not None:
                        _at(tokens.new_tokens, slot).fill_(wanted)
                forced = self._script.sequences[place] if self._script else None
                if request.py_return_log_probs and forced is not None:
                    mine = wanted, logprob(logits[row].float(), wanted, forced.sampling)
                    self.computed += 1
            if request.py_return_log_probs:
                result = request.py_result
                self._own.setdefault(id(result), (result, deque()))[1].append(mine)

    def _wanted(self, place: Place, position: int) -> int | None:
        forced = self._script.sequences.get(place) if self._script is not None else None
        if forced is None or position >= len(forced.tokens):
            return None
        return int(forced.tokens[position])

    def _around_logprobs(self, wrapped: Any, result: Any, args: Any, kwargs: Any) -> Any:
        """The logprobs of a draw, as they are handed to its request."""
        known = self._own.get(id(result))
        if known is not None and args:
            beams = args[0]
            entries = [self._entry(entry, known[1]) for entry in beams[0]]
            args = ([entries, *beams[1:]], *args[1:])
        return wrapped(*args, **kwargs)

    def _entry(self, entry: Any, mine: deque[Own]) -> Any:
        own = mine.popleft() if mine else None
        if own is None:
            return entry
        token, value = own
        if not isinstance(entry, dict):
            return value
        if token in entry:  # among the most probable ones: the engine's own value
            self.computed -= 1
            return {token: entry[token], **entry}
        from tensorrt_llm.executor.result import Logprob

        return {token: Logprob(logprob=value, rank=None), **entry}

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Keep what goes wrong in the thread of the loop, which would hide it."""
        try:
            return call(*args)
        except BaseException as error:
            self.problem = self.problem or error
            raise


def place_of(request: Any) -> Place:
    """Of a request of the loop; that of a dummy means nothing."""
    client = getattr(request, "py_client_id", None)
    sample = getattr(request, SAMPLE, None) or 0
    return (request_id(request) if client is None else int(client), int(sample))


def logprob(logits: torch.Tensor, token: int, sampling: Mapping[str, Any]) -> float:
    """Logprob of a token that was not drawn, as the engine defines it.

    Args:
        logits: float32 [vocabulary].
        token: id.
        sampling: resolved settings, see `rolltape.recorder.tensorrt_llm.sampling`.
    """
    if sampling.get("logprobs_mode") != "processed":
        return float(logits.log_softmax(-1)[token])
    if sampling.get("greedy"):
        return 0.0 if int(logits.argmax()) == token else float("-inf")
    if sampling.get("temperature") is not None:
        logits = logits / sampling["temperature"]
    kept = torch.ones_like(logits, dtype=torch.bool)
    top_k, top_p, min_p = (sampling.get(name) for name in ("top_k", "top_p", "min_p"))
    if top_k:
        kept &= logits >= logits.topk(min(top_k, len(logits))).values[-1]
    if top_p is not None and top_p < 1:
        ordered = logits.masked_fill(~kept, float("-inf")).softmax(-1).sort(descending=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept[ordered.indices[before >= top_p]] = False
    if min_p:
        probabilities = logits.softmax(-1)
        kept &= probabilities >= min_p * probabilities.max()
    return float(logits.masked_fill(~kept, float("-inf")).log_softmax(-1)[token])


def _at(tokens: torch.Tensor, slot: int) -> torch.Tensor:
    """The drawn token of a slot: [slots], or [drafted and drawn, slots, beams]."""
    return tokens[slot] if tokens.dim() == 1 else tokens[0, slot, 0]


def _drawing(batch: Any) -> list[tuple[Any, int]]:
    """Each request that draws a token, and the row of its logits."""
    found, at = [], 0
    context = batch.context_requests
    gathered = any(getattr(r, "py_return_context_logits", False) for r in context)
    for request in context:
        at += int(request.context_chunk_size) if gathered else 1
        if request.is_last_context_chunk:
            found.append((request, at - 1))
    for request in batch.generation_requests:
        at += 1
        if not is_dummy(request):
            found.append((request, at - 1))
    return found
