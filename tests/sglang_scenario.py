"""One scenario for SGLang's tokenizer manager, for the double and for the real source.

    python -m tests.sglang_scenario SOURCE TAPE

runs it on the real `TokenizerManager` of a checkout or an unpacked wheel, with stubs in place of
packages that are not needed, and prints as JSON what callers got. No GPU is needed: no model runs,
the answers of the scheduler are made here.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYERS, K, EXPERTS, VOCAB, DENSE = 4, 2, 8, 50, 0
PROMPT = [3, 1, 4, 1, 5]


class Config(SimpleNamespace):
    """A configuration of Hugging Face, of a mixture of experts with one dense layer."""

    def to_dict(self) -> dict[str, Any]:
        """As there."""
        return dict(vars(self))


CONFIG = Config(
    model_type="qwen3_moe",
    num_hidden_layers=LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=K,
    mlp_only_layers=[DENSE],
    decoder_sparse_step=1,
)


def routes(seed: int, rows: int) -> np.ndarray:
    """int32 [rows, LAYERS, K]: two different experts, zeros in the dense layer."""
    first = np.random.default_rng(seed).integers(1, EXPERTS, (rows, LAYERS, 1))
    table = np.concatenate([first, (first + 1) % EXPERTS], 2).astype(np.int32)
    table[:, DENSE] = 0
    return table


def encoded(table: np.ndarray) -> str:
    """As the detokenizer sends it."""
    return base64.b64encode(np.ascontiguousarray(table, "<i4").tobytes()).decode()


def logprobs(seed: int, n: int) -> list[float]:
    """Whatever the engine measured."""
    return np.random.default_rng(seed).uniform(-4, -0.1, n).astype(np.float32).tolist()


class Drive:
    """A tokenizer manager, and the scheduler's side of it."""

    def __init__(self) -> None:
        self.io = importlib.import_module("sglang.srt.managers.io_struct")
        self.module = importlib.import_module("sglang.srt.managers.tokenizer_manager")
        self.params = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams
        self.mask = importlib.import_module("sglang.srt.sampling.sampling_mask").SamplingMaskChunk
        self.span = importlib.import_module("sglang.srt.utils.weight_versions").WeightVersionSpan
        real = not hasattr(self.module.TokenizerManager, "_double_wait")
        self.manager: Any = self._real() if real else self._double()
        self.sent: list[Any] = []

    def _args(self) -> Any:
        config = SimpleNamespace(
            hf_config=CONFIG,
            hf_text_config=CONFIG,
            vocab_size=VOCAB,
            model_path="models/m",
            dtype="torch.bfloat16",
        )
        return SimpleNamespace(
            _double_model_config=config,
            weight_version="default",
            enable_return_routed_experts=True,
            attention_backend="fa3",
            api_key="secret",
        )

    def _double(self) -> Any:
        return self.module.TokenizerManager(self._args())

    def _real(self) -> Any:
        from unittest.mock import MagicMock

        manager = object.__new__(self.module.TokenizerManager)
        named = {"weight_version": "default"}
        manager.server_args = self._args()
        manager.model_config = manager.server_args._double_model_config
        manager.rid_to_state = {}
        manager.encoder_dispatch_ready = {}
        for name in ("enable_metrics", "enable_lora", "enable_trace", "skip_tokenizer_init"):
            setattr(manager, name, False)
        manager.incremental_streaming_output = False
        manager.dump_requests_folder = manager.crash_dump_folder = ""
        manager.config_value = named.__getitem__
        manager.resolved_config_dict = lambda base: {**base, **named}
        manager.record_config_updates = lambda source, **fields: named.update(fields)
        manager.auto_create_handle_loop = lambda: None
        manager._double_sent = []
        manager._dispatch_to_scheduler = lambda obj: manager._double_sent.extend(
            getattr(obj, "batch", [obj])
        )
        manager.mm_processor = None
        manager.is_pause = False
        manager.is_pause_cond = asyncio.Condition()
        manager._engine_state_changed_callback = None
        manager.positional_embeds_transport = MagicMock()
        manager.cuda_vmm_feature_transport = MagicMock()

        async def prepared(items: Any) -> list[Any]:
            return []

        async def loaded(obj: Any) -> tuple[bool, str, int]:
            return obj.model_path != "nowhere", "", 0

        manager.cuda_vmm_feature_transport.prepare_for_dispatch_async = prepared
        manager.model_update_lock = MagicMock(writer_lock=_Lock())
        manager._wait_for_model_update_from_disk = loaded
        settings = SimpleNamespace(batch_notify_size=16, skip_tokenizer_init=False)
        self.module.wrap_shm_features = lambda request: request
        self.module.get_serving = lambda: settings
        self.module.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
        return manager

    async def send(self, rid: str, *, together: bool = False, **fields: Any) -> None:
        """Hand in a request, in the form that goes to the scheduler."""
        params = self.params(**fields.pop("params", {}))
        given = {
            "rid": rid,
            "input_ids": array("q", fields.pop("prompt", PROMPT)),
            "sampling_params": params,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
            **fields,
        }
        names = set(_fields(self.io.TokenizedGenerateReqInput))
        required = dict.fromkeys(_required(self.io.TokenizedGenerateReqInput))
        given = {**required, **{k: v for k, v in given.items() if k in names}}
        request = self.io.TokenizedGenerateReqInput(**given)
        obj = self.io.GenerateReqInput(
            rid=rid, return_logprob=given["return_logprob"], return_sampling_mask=False
        )
        obj.return_logprob = bool(given["return_logprob"])
        obj.top_logprobs_num, obj.token_ids_logprob = 0, None
        stats = _Stats()
        state = self.module.ReqState([], False, asyncio.Event(), obj, stats)
        self.manager.rid_to_state[rid] = state
        if hasattr(request, "time_stats"):
            request.time_stats = _Stats()
        if together:
            await self.manager._send_batch_request([request])
        else:
            await self.manager._send_one_request(request)
        self.sent.append(state)

    async def output(self, *answers: dict[str, Any]) -> None:
        """A batch of answers: rid, ids, and what else there is."""
        columns: dict[str, Any] = {
            "rids": [a["rid"] for a in answers],
            "finished_reasons": [a.get("reason") for a in answers],
            "output_strs": ["" for _ in answers],
            "output_ids": [array("q", a["ids"]) for a in answers],
            "prompt_tokens": [len(PROMPT) for _ in answers],
            "completion_tokens": [a.get("total", len(a["ids"])) for a in answers],
            "reasoning_tokens": [0 for _ in answers],
            "cached_tokens": [a.get("cached", 0) for a in answers],
            "output_token_logprobs_val": [a.get("logprobs") for a in answers],
            "output_token_logprobs_idx": [
                a.get("logprob_ids", a["ids"]) if a.get("logprobs") is not None else None
                for a in answers
            ],
            "output_token_sampling_mask": [a.get("mask") for a in answers],
            "routed_experts": [a.get("routes") for a in answers],
            "retraction_counts": [a.get("retractions", 0) for a in answers],
            "weight_versions": [a.get("versions") for a in answers],
        }
        kind = self.io.BatchStrOutput
        names = set(_fields(kind))
        given: dict[str, Any] = {k: v for k, v in columns.items() if k in names}
        given = dict.fromkeys(_required(kind)) | given
        await self.manager._handle_batch_output(kind(**given))

    def versions(self, *spans: tuple[str, int, int]) -> list[Any]:
        """As the scheduler sends them."""
        return [self.span(version=v, start=a, end=b) for v, a, b in spans]

    async def update(self, path: str, name: str | None) -> Any:
        """Load other weights."""
        kind = self.io.UpdateWeightFromDiskReqInput
        given = {**dict.fromkeys(_required(kind)), "model_path": path, "weight_version": name}
        if hasattr(self.manager, "_double_load"):

            async def loaded(obj: Any) -> bool:
                return bool(obj.model_path != "nowhere")

            self.manager._double_load = loaded
        obj = kind(**given)
        obj.load_format = "auto"
        return await self.manager.update_weights_from_disk(obj)


class _Lock:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *args: object) -> None:
        return None


class _Stats:
    """Times of a request; nobody looks at them here."""

    first_token_time = 1.0
    created_time = 0.0
    trace_ctx = SimpleNamespace(tracing_enable=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0.0


def _fields(kind: Any) -> list[str]:
    return list(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)


def _required(kind: Any) -> list[str]:
    import inspect

    parameters = inspect.signature(kind).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty]


LENGTH, STOP = {"type": "length", "length": 5}, {"type": "stop", "matched": 1}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def scenario(drive: Drive) -> list[Any]:
    """Everything that can happen to a request; returns what callers got."""
    rows = len(PROMPT) + 5 - 1
    warm = {"temperature": 0.7, "max_new_tokens": 5}
    await drive.send("plain", params=warm, return_logprob=True, return_routed_experts=True)
    await drive.send("greedy", params={"temperature": 0.0}, return_logprob=True)
    await drive.send("cut", params={"top_k": 3}, return_logprob=True, return_sampling_mask=True)
    await drive.send("silent", params={}, together=True)
    await drive.send("waiting", params={})
    await drive.send(
        "retracted",
        params={"repetition_penalty": 1.1},
        return_routed_experts=True,
        routed_experts_start_len=2,
    )
    await drive.send("short", params={}, return_routed_experts=True)
    lp = logprobs(1, 5)
    await drive.output(
        {"rid": "plain", "ids": [7, 8, 9], "logprobs": lp[:3]},
        {"rid": "retracted", "ids": [20, 21]},
    )
    await drive.update("models/m1", "v1")
    await drive.update("nowhere", "v2")
    mask = drive.mask(
        lengths=np.array([3, 1], np.int32),
        token_ids=np.array([30, 12, 25, 31], np.int32),
        logprobs=np.array([-0.5, 0.0], np.float32),
    )
    await drive.output(
        {
            "rid": "plain",
            "ids": [10, 11],
            "total": 5,
            "logprobs": lp[3:],
            "reason": LENGTH,
            "routes": encoded(routes(1, rows)),
            "versions": drive.versions(("default", 0, 3), ("v1", 3, 5)),
            "cached": 4,
        },
        {"rid": "greedy", "ids": [1], "logprobs": [-0.2], "reason": STOP},
        {"rid": "cut", "ids": [30, 31], "logprobs": [-1.0, -2.0], "mask": mask, "reason": LENGTH},
        {
            "rid": "silent",
            "ids": [2, 2],
            "reason": LENGTH,
            **_asked(drive, "silent"),
        },
        {"rid": "short", "ids": [6], "reason": STOP, "routes": encoded(routes(3, 2))},
    )
    abort = drive.io.AbortReq
    drive.manager._handle_abort_req(abort(rid="waiting"))
    padded = routes(2, len(PROMPT) + 3 - 1 - 2)
    padded[1] = -1
    await drive.output(
        {
            "rid": "retracted",
            "ids": [22],
            "total": 3,
            "retractions": 1,
            "reason": ABORT,
            "routes": encoded(padded),
        }
    )
    return [state.out_list for state in drive.sent]


def _asked(drive: Drive, rid: str) -> dict[str, Any]:
    """The scheduler sends what the request that reached it asks for."""
    sent = {r.rid: r for r in getattr(drive.manager, "_double_sent", [])}.get(rid)
    found: dict[str, Any] = {}
    if sent is not None and sent.return_logprob:
        found["logprobs"] = [-3.0, -4.0]
    if sent is not None and sent.return_routed_experts:
        found["routes"] = encoded(routes(4, len(PROMPT) + 2 - 1))
    return found


# -- the real source ----------------------------------------------------------------------

#: Packages that the real front end imports and does not need here. Others must be installed.
STUBS = ("IPython", "torchvision", "tvm_ffi", "sentencepiece", "compressed_tensors", "gguf")


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else _Anything("anything", (), {})


class _Stubs:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        if name.partition(".")[0] not in STUBS:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        import types

        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return _Anything(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def import_source(folder: str) -> None:
    """Import the real tokenizer manager.

    Raises:
        ImportError: one of its packages is not installed, see `STUBS`.
    """
    # transformers looks for some of them, and must find that they are not there
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    assert None not in (AutoImageProcessor, AutoProcessor, AutoTokenizer)
    sys.path.insert(0, folder)
    sys.meta_path.append(_Stubs())
    importlib.import_module("sglang.srt.managers.tokenizer_manager")


def main(folder: str, tape: str) -> None:
    """Record the scenario on the real source."""
    from rolltape.recorder import session
    from rolltape.recorder.doctor import targets_of
    from rolltape.recorder.options import Options
    from rolltape.recorder.targets import check
    from rolltape.store import create_tape, seal

    import_source(folder)
    from rolltape.recorder.sglang import adapter

    bindings = [(b.target.name, b.state) for b in map(check, targets_of("sglang"))]
    plain = asyncio.run(scenario(Drive()))
    create_tape(tape, role="rollout", provenance={})
    session.start(tape, Options(strict=True))
    adapter.bind()
    recorded = asyncio.run(scenario(Drive()))
    session.stop()
    adapter.unbind()
    seal(tape)
    print(json.dumps({"plain": plain, "recorded": recorded, "bindings": bindings}, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
