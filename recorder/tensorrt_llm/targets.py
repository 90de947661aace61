"""Where the TensorRT-LLM adapter stands. Imports no engine.

Names move from release to release, so what has two homes is listed twice; each says what is
used instead where it does not exist.
"""

from __future__ import annotations

from rolltape.recorder.targets import Target

RESULT = "tensorrt_llm.executor.result"
EXECUTOR = "tensorrt_llm.executor.executor"
WORKER = "tensorrt_llm.executor.base_worker"
LLM = "tensorrt_llm.llmapi.llm"
LOOP = "tensorrt_llm._torch.pyexecutor.py_executor"
GRAPHS = "tensorrt_llm._torch.pyexecutor.cuda_graph_runner"
LOADER = "tensorrt_llm._torch.pyexecutor.model_loader"
REQUEST = "tensorrt_llm._torch.pyexecutor.llm_request"
SCHEDULER = "tensorrt_llm._torch.pyexecutor.scheduler.scheduler"
CAPTURE = "tensorrt_llm._torch.route_capture"
TUNER = "tensorrt_llm._torch.autotuner"
ROUTING = "tensorrt_llm._torch.modules.fused_moe.routing"
MOE = "tensorrt_llm._torch.modules.fused_moe.interface"
RLHF = "tensorrt_llm.llmapi.rlhf_utils"
RAY = "tensorrt_llm._ray_utils"
RAY_WORKER = "tensorrt_llm.executor.ray_gpu_worker"
SAMPLING = "tensorrt_llm.sampling_params"
SAMPLING_NEW = "tensorrt_llm.executor.params.sampling"


def _target(module: str, symbol: str, gives: str, *parameters: str, instead: str = "") -> Target:
    return Target(module=module, symbol=symbol, parameters=parameters, gives=gives, instead=instead)


_OUTPUT = "read with a default; that column stays empty"
_STATE = "read with a default"

TARGETS: tuple[Target, ...] = (
    # the front end
    _target(RESULT, "GenerationResult", "lifecycle", "generation_request", "executor"),
    _target(RESULT, "GenerationResultBase._handle_response", "lifecycle", "response"),
    _target(
        RESULT,
        "GenerationResultBase._handle_sequence",
        "tokens, logprobs",
        "finish_reasons",
        "response_tensors",
        "sequence_index",
    ),
    _target(RESULT, "DetokenizedGenerationResultBase._handle_response", "lifecycle", "response"),
    _target(RESULT, "Logprob", "logprobs", "logprob"),
    _target(RESULT, "CompletionOutput", "tokens", "index", "token_ids", "finish_reason"),
    _target(RESULT, "CompletionOutput.logprobs", "logprobs"),
    _target(RESULT, "CompletionOutput.prompt_logprobs", "logprobs", instead=_OUTPUT),
    _target(
        RESULT,
        "CompletionOutput.additional_generation_outputs",
        "routes",
        instead="the recorder's own buffer in the worker",
    ),
    _target(
        RESULT,
        "CompletionOutput.routed_experts",
        "routes",
        instead="additional_generation_outputs['routed_experts']",
    ),
    _target(LLM, "LLM.__init__", "settings", "model"),
    _target(EXECUTOR, "GenerationExecutor.__init__", "lifecycle"),
    _target(WORKER, "BaseWorker", "settings", "llm_args", instead="no name of the model"),
    _target(WORKER, "BaseWorker._enqueue_request", "lifecycle", "request", instead=_STATE),
    _target(SAMPLING, "SamplingParams", "settings", "temperature", "top_k", "top_p", "logprobs"),
    _target(
        SAMPLING_NEW,
        "SamplingParams",
        "settings",
        "logprobs_mode",
        "logprobs_simple_format",
        instead="logprobs are raw",
    ),
    _target(
        SAMPLING_NEW,
        "SamplingParams.params_imply_greedy_decoding",
        "settings",
        "temperature",
        instead="the same rule, in the adapter",
    ),
    # the worker
    _target(LOOP, "PyExecutor._forward_step", "schedule", "scheduled_requests"),
    _target(
        LOOP,
        "PyExecutor.control_action",
        "weights",
        instead="reset_prefix_cache completes a version",
    ),
    _target(LOOP, "PyExecutor.reset_prefix_cache", "weights", instead="control_action does"),
    _target(LOOP, "PyExecutor._terminate_request", "lifecycle", "request", instead=_STATE),
    _target(LOOP, "PyExecutor.shutdown", "lifecycle", instead="what is left is written at exit"),
    _target(GRAPHS, "CUDAGraphRunner.replay", "schedule", "key", instead="steps.graph is null"),
    _target(
        GRAPHS,
        "CUDAGraphRunner.pad_batch",
        "schedule",
        "scheduled_requests",
        instead="the padded size of a graph is read from its key",
    ),
    _target(
        GRAPHS,
        "CUDAGraphRunner.capture",
        "tactics",
        "key",
        instead="tactics chosen in a capture carry no key of its graph",
    ),
    _target(LOADER, "ModelLoader.load", "routes", "checkpoint_dir", instead="no routes"),
    _target(LOADER, "ModelLoader.reload", "weights", "model", "weights", instead="no versions"),
    _target(REQUEST, "LlmRequest", "schedule", "client_id"),
    _target(REQUEST, "LlmRequest.create_child_request", "lifecycle", "child_id"),
    _target(REQUEST, "LlmRequest.py_client_id", "lifecycle"),
    _target(REQUEST, "LlmRequest.py_request_id", "lifecycle"),
    _target(REQUEST, "LlmRequest.py_prompt_len", "schedule"),
    _target(REQUEST, "LlmRequest.is_dummy", "schedule", instead="the three flags that it joins"),
    _target(SCHEDULER, "ScheduledRequests.context_requests", "schedule"),
    _target(SCHEDULER, "ScheduledRequests.generation_requests", "schedule"),
    _target(SCHEDULER, "ScheduledRequests.paused_requests", "lifecycle", instead=_STATE),
    _target(MOE, "MoE", "routes", "routing_method", "num_experts"),
    _target(ROUTING, "BaseMoeRoutingMethod.apply", "routes"),
    _target(ROUTING, "BaseMoeRoutingMethod.experts_per_token", "routes", instead="top_k"),
    _target(
        CAPTURE,
        "RouteCapture.create",
        "routes",
        "model_engine",
        instead="the recorder's own buffer",
    ),
    _target(TUNER, "AutoTuner.choose_one", "tactics", "custom_op", "runners", "inputs"),
    _target(TUNER, "AutoTuner.get", "tactics"),
    _target(TUNER, "AutoTuner.profiling_cache", "tactics"),
    # Ray and reinforcement learning
    _target(
        RAY_WORKER,
        "RayWorkerWrapper._inject_worker_extension",
        "lifecycle",
        "extension_cls_name",
        instead="no worker extension: the `.pth` file, or runtime_env",
    ),
    _target(RLHF, "WorkerExtension", "lifecycle", instead="the `.pth` file, or runtime_env"),
    _target(RLHF, "WorkerExtension.update_weights", "weights", "ipc_handles", instead=_STATE),
    _target(RAY, "control_action_decorator", "weights", "drain", instead=_STATE),
)
