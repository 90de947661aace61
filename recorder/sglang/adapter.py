"""Stands at the tokenizer manager: requests on their way in, answers on their way out.

On the event loop of the engine it only takes references; rows are made in the writer thread. What
an answer holds is what the request asked for, unless ROLLTAPE_SGLANG_ASK names more: then the
scheduler is asked for it and the caller does not see it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolltape.recorder.gating import LeftOut, wants_prompt
from rolltape.recorder.patches import Patches
from rolltape.recorder.rows import engine_job
from rolltape.recorder.session import Session, recording
from rolltape.recorder.sglang.facts import engine_facts, find_moe, read_sampling, settings
from rolltape.recorder.sglang.rows import Answer, Life, Scribe
from rolltape.store import TapeWriter, new_uuid, token_digest

#: Tokens of running requests are handed over after this long.
BLOCK_SECONDS = 1.0
#: What the scheduler may be asked for on top: `logprobs`, `routes`.
ASK_VARIABLE = "ROLLTAPE_SGLANG_ASK"

_UPDATES = ("disk", "tensor", "distributed", "ipc")
_OWN_ID = re.compile(r"[0-9a-f]{32}")  # uuid4: it does not come again
_patches = Patches()
_fronts: weakref.WeakKeyDictionary[Any, Front] = weakref.WeakKeyDictionary()


def bind() -> bool:
    """Patch the tokenizer manager; called once its module has been imported.

    Returns:
        Whether it was not patched before.
    """
    if _patches:
        return False
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    around = {
        "_send_one_request": _shown("sglang.open", "tokenized_obj", _open_one),
        "_send_batch_request": _shown("sglang.open", "tokenized_objs", Front.opened),
        "_handle_batch_output": _shown("sglang.answer", "recv_obj", Front.answered),
        "_handle_abort_req": _shown("sglang.abort", "recv_obj", Front.aborted),
        "update_weight_version": _around_update,
        **{f"update_weights_from_{kind}": _around_update for kind in _UPDATES},
    }
    for name, wrapper in around.items():
        _patches.around(TokenizerManager, name, wrapper, inherited=True)
    return bool(_patches)


def unbind() -> None:
    """Undo `bind`."""
    _patches.undo()


class Front:
    """What is known of one tokenizer manager.

    Args:
        session: where to.
        manager: a `TokenizerManager`.
    """

    def __init__(self, session: Session, manager: Any) -> None:
        self.session = weakref.ref(session)
        self.engine = new_uuid()
        self.lives: dict[str, Life] = {}
        self.versions: dict[str, list[int]] = {}
        self.version = 0
        self._pending: dict[Life, list[Answer]] = {}
        self._since = 0.0
        self._left_out = LeftOut(session, self.engine)
        self._reused: dict[str, int] = {}
        self._groups: dict[int, tuple[Any, str, int]] = {}
        text = getattr(manager.model_config, "hf_text_config", None)
        moe = find_moe(text) if session.options.routes else find_moe(None)
        facts, asked = engine_facts(manager, moe)
        effective = facts["effective"]
        self.ask = frozenset(w for w in os.environ.get(ASK_VARIABLE, "").split(",") if w)
        if not effective.get("enable_return_routed_experts"):
            self.ask -= {"routes"}
        self.scribe = Scribe(
            engine=self.engine,
            moe=moe,
            vocab=facts["vocab_size"],
            # trained on policy, the engine takes the log-softmax of bfloat16 logits
            dtype="bfloat16" if effective.get("rl_on_policy_target") else "float32",
        )
        self._put(session, engine_job(self.engine, "rollout", "sglang", facts, asked), "engines")
        session.flushers.append(lambda: self._flush(session))
        self.name_version(session, self._named(manager))

    def _put(self, session: Session, job: Any, table: str) -> None:
        gap = {"engine": self.engine, "detail": {"table": table}}
        session.put(job, nbytes=4096, gap=gap)

    @staticmethod
    def _named(manager: Any) -> str:
        read = getattr(manager, "config_value", None)
        args = getattr(manager, "server_args", None)
        name = read("weight_version") if read is not None else None
        return str(name if name is not None else getattr(args, "weight_version", "default"))

    # -- weights --------------------------------------------------------------------------

    def name_version(self, session: Session, name: str) -> None:
        """The present version has this name."""
        numbers = self.versions.setdefault(name, [])
        if self.version in numbers:
            return
        numbers.append(self.version)
        row = {
            "engine": self.engine,
            "version": self.version,
            "state": "complete",
            "t_ns": time.time_ns(),
            "group": "",
            "label": name,
            "reason": "the scheduler's weights are not read",
        }

        def job(writer: TapeWriter) -> None:
            writer.append("weights", row)

        self._put(session, job, "weights")

    def _number(self, session: Session, name: str) -> int | None:
        """The only version of that name; None if there are several."""
        if name not in self.versions:  # somebody else has updated the weights, or named them
            self.version += 1
            self.name_version(session, name)
        numbers = self.versions[name]
        return numbers[0] if len(numbers) == 1 else None

    def _spans(
        self, session: Session, spans: Any
    ) -> tuple[tuple[int | None, int, int], ...] | None:
        if spans is None:
            return None
        return tuple((self._number(session, str(s.version)), s.start, s.end) for s in spans)

    def updated(self, session: Session, what: str, obj: Any, manager: Any) -> None:
        """An update went through: a new version, or only a new name of the present one."""
        name = getattr(obj, "weight_version", None) or getattr(obj, "new_version", None)
        if what != "update_weight_version":
            self.version += 1
        name = str(name) if name is not None else self._named(manager)
        self.name_version(session, name)
        detail: dict[str, Any] = {"version": self.version, "name": name, "how": what}
        if getattr(obj, "flush_cache", None) is not None:
            detail["flush_cache"] = bool(obj.flush_cache)
        session.event("update", engine=self.engine, detail=detail)

    # -- requests -------------------------------------------------------------------------

    def opened(self, session: Session, manager: Any, requests: Sequence[Any]) -> None:
        """Requests are about to go to the scheduler: `TokenizedGenerateReqInput`."""
        lives = []
        for request in requests:
            life = self._life(session, manager, request)
            if life is not None:
                self.lives[request.rid] = life
                lives.append(life)
        if lives:
            size = sum(512 + life.prompt.nbytes for life in lives)
            gap = [
                {
                    "engine": self.engine,
                    "request": life.request,
                    "sample": life.sample,
                    "detail": {"table": "sequences"},
                }
                for life in lives
            ]
            session.put(self.scribe.opening(lives), nbytes=size, gap=gap)

    def _life(self, session: Session, manager: Any, request: Any) -> Life | None:
        params = getattr(request, "sampling_params", None)
        if params is None or not hasattr(request, "return_logprob"):
            return None  # an embedding request
        state = getattr(manager, "rid_to_state", {}).get(request.rid)
        many = getattr(getattr(state, "obj", None), "parallel_sample_num", 1) or 1
        if many > 1 and params.max_new_tokens == 0:
            return None  # fills the prefix cache for the samples that follow
        why = _unrecorded(request)
        if why is not None:
            detail = {"reason": why, "request": request.rid}
            session.event("gap", engine=self.engine, detail=detail)
            return None
        if not wants_prompt(request.input_ids, session.options):
            self._left_out.add("sequences")
            return None
        prompt = np.array(request.input_ids, np.uint32)
        custom = bool(getattr(request, "custom_logit_processor", None))
        name, sample = self._name(request, many)
        return Life(
            request=name,
            sample=sample,
            external=str(request.rid),
            prompt=prompt,
            group=f"{self.engine[:8]}.{name}" if many > 1 else _digest_group(prompt),
            derived=many <= 1,
            sampling=read_sampling(params, custom=custom),
            settings=json.dumps(settings(params), default=str),
            opened_ns=time.time_ns(),
            routes_from=int(getattr(request, "routed_experts_start_len", 0) or 0),
            asked=self._ask(request),
        )

    def _name(self, request: Any, many: int) -> tuple[str, int]:
        rid = str(request.rid)
        if many > 1:
            # samples get ids of their own, but share the tokens of their prompt
            known = self._groups.get(id(request.input_ids))
            if known is not None and known[0] is request.input_ids:
                sample = known[2] + 1
                self._groups[id(request.input_ids)] = (known[0], known[1], sample)
                if sample + 1 == many:
                    del self._groups[id(request.input_ids)]
                return known[1], sample
            self._groups[id(request.input_ids)] = (request.input_ids, rid, 0)
        if _OWN_ID.fullmatch(rid):
            return rid, 0
        again = self._reused[rid] = self._reused.get(rid, -1) + 1
        return (f"{rid}~{again}" if again else rid), 0

    def _ask(self, request: Any) -> frozenset[str]:
        added = set()
        if "logprobs" in self.ask and not request.return_logprob:
            request.return_logprob = True
            request.logprob_start_len = -1
            request.top_logprobs_num = 0
            request.token_ids_logprob = None
            added.add("logprobs")
        if "routes" in self.ask and not getattr(request, "return_routed_experts", True):
            request.return_routed_experts = True
            added.add("routes")
        return frozenset(added)

    # -- answers --------------------------------------------------------------------------

    def answered(self, session: Session, manager: Any, out: Any) -> None:
        """A batch of answers: `BatchStrOutput` or `BatchTokenIDOutput`."""
        if getattr(out, "finished_reasons", None) is None or not hasattr(out, "output_ids"):
            return
        ended: dict[Life, list[Answer]] = {}
        named = None
        for i, rid in enumerate(out.rids):
            life = self.lives.get(rid)
            if life is None:
                continue
            if _item(out, "beam_search_output", i) is not None:
                self._give_up(session, rid, life, "beam search is not recorded")
                continue
            if named is None:
                named = self._named(manager)
            answer = self._answer(session, out, i, life, named)
            if not self._pending:
                self._since = time.monotonic()
            self._pending.setdefault(life, []).append(answer)
            if answer.finish is not None:
                del self.lives[rid]
                ended[life] = self._pending.pop(life)
                if answer.finish == "abort":
                    self._aborted(session, life)
        self._hand_over(session, ended)
        if self._pending and time.monotonic() - self._since >= BLOCK_SECONDS:
            self._flush(session)

    def _flush(self, session: Session) -> None:
        pending, self._pending = self._pending, {}
        self._hand_over(session, pending)

    def _answer(self, session: Session, out: Any, i: int, life: Life, named: str) -> Answer:
        count = _item(out, "retraction_counts", i) or 0
        if count > life.retractions:
            life.retractions = count
            detail = {"retractions": count}
            where = {"request": life.request, "sample": life.sample}
            session.event("preempt", engine=self.engine, **where, detail=detail)
        reason = out.finished_reasons[i]
        spans = _item(out, "weight_versions", i)
        routes = _item(out, "routed_experts", i)
        if routes is not None and "routes" in life.asked:
            out.routed_experts[i] = None  # the caller did not ask for it
        ids = _item(out, "output_ids", i)
        return Answer(
            ids=() if ids is None else ids,
            logprobs=_item(out, "output_token_logprobs_val", i),
            logprob_ids=_item(out, "output_token_logprobs_idx", i),
            mask=_item(out, "output_token_sampling_mask", i),
            finish=None if reason is None else str(_kind(reason)),
            routes=routes if session.options.routes else None,
            versions=self._spans(session, spans),
            version=self._number(session, named),
            cached=_item(out, "cached_tokens", i),
        )

    def aborted(self, session: Session, manager: Any, out: Any) -> None:
        """A request was aborted before it had any output: `AbortReq`."""
        life = self.lives.pop(getattr(out, "rid", ""), None)
        if life is None:
            return
        spans = getattr(out, "weight_versions", None)
        answer = Answer(
            ids=(),
            finish="abort",
            versions=self._spans(session, spans),
            version=self._number(session, self._named(manager)),
        )
        self._aborted(session, life)
        self._hand_over(session, {life: [*self._pending.pop(life, []), answer]})

    def _aborted(self, session: Session, life: Life) -> None:
        where = {"request": life.request, "sample": life.sample}
        session.event("abort", engine=self.engine, **where, detail={})

    def _give_up(self, session: Session, rid: str, life: Life, why: str) -> None:
        del self.lives[rid]
        self._pending.pop(life, None)
        where = {"request": life.request, "sample": life.sample}
        session.event("gap", engine=self.engine, **where, detail={"reason": why})

    def _hand_over(self, session: Session, batch: dict[Life, list[Answer]]) -> None:
        if not batch:
            return
        items = list(batch.items())
        size = sum(64 * len(a.ids) + len(a.routes or "") + 256 for _, some in items for a in some)
        gap = [self.scribe.gap(life, some) for life, some in items]
        if not session.put(self.scribe.answers(items, time.time_ns()), nbytes=size, gap=gap):
            for life, some in items:
                life.lost = True
                life.length += sum(len(a.ids) for a in some)


def _front(session: Session, manager: Any) -> Front:
    front = _fronts.get(manager)
    if front is None or front.session() is not session:
        front = _fronts[manager] = Front(session, manager)
    return front


def _unrecorded(request: Any) -> str | None:
    if request.input_ids is None or getattr(request, "input_embeds", None) is not None:
        return "prompts given as embeddings are not recorded"
    if getattr(request, "mm_inputs", None):
        return "multimodal prompts are not recorded: their ids are placeholders"
    if getattr(request, "session_params", None) is not None:
        return "session requests are not recorded: only the scheduler knows the whole prompt"
    if not len(request.input_ids):
        return "an empty prompt is not recorded"
    return None


def _item(out: Any, name: str, i: int) -> Any:
    """Entry of a list that may be absent, None or empty."""
    values = getattr(out, name, None)
    return values[i] if values is not None and len(values) > i else None


def _kind(reason: Any) -> Any:
    return reason.get("type") if isinstance(reason, dict) else getattr(reason, "type", reason)


def _digest_group(prompt: np.ndarray) -> str:
    return "p" + token_digest(len(prompt), prompt)[:16]


# -- the patches --------------------------------------------------------------------------


def _shown(fault: str, keyword: str, show: Callable[[Front, Session, Any, Any], None]) -> Any:
    """Wrapper of a method with one argument, which is shown to the front before the engine has it.

    Args:
        fault: what an error of ours is counted as.
        keyword: name of the argument.
        show: called with the front, the session, the manager and the argument.
    """

    def look(session: Session, manager: Any, given: Any) -> None:
        show(_front(session, manager), session, manager, given)

    def around(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> Any:
        session = recording()
        if session is not None:
            session.safely(fault, look, session, manager, args[0] if args else kwargs.get(keyword))
        return wrapped(*args, **kwargs)

    return around


def _open_one(front: Front, session: Session, manager: Any, request: Any) -> None:
    front.opened(session, manager, [request])


def _around_update(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    session = recording()
    if session is None:
        return result
    obj = args[0] if args else kwargs.get("obj")
    what = wrapped.__name__
    if inspect.isawaitable(result):
        return _then(result, session, manager, what, obj)
    session.safely("sglang.update", _updated, session, manager, what, obj, result)
    return result


async def _then(result: Any, session: Session, manager: Any, what: str, obj: Any) -> Any:
    # the engine that starts with the update has version 0 before it
    session.safely("sglang.update", _front, session, manager)
    answer = await result
    session.safely("sglang.update", _updated, session, manager, what, obj, answer)
    return answer


def _updated(session: Session, manager: Any, what: str, obj: Any, answer: Any) -> None:
    success = answer[0] if isinstance(answer, tuple) and answer else True
    if success:
        _front(session, manager).updated(session, what, obj, manager)
    else:
        front = _front(session, manager)
        detail = {"how": what, "failed": str(answer[1]) if len(answer) > 1 else ""}
        session.event("update", engine=front.engine, detail=detail)
