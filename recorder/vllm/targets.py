"""Where the vLLM adapter stands."""

from __future__ import annotations

from rolltape.recorder.targets import Target

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_RUNNER_2 = "vllm.v1.worker.gpu.model_runner"
_SAMPLER_2 = "vllm.v1.worker.gpu.sample.sampler"
_OUTPUTS = "vllm.v1.engine.output_processor"
_WORKER = "vllm.v1.worker.worker_base"

TARGETS: tuple[Target, ...] = (
    Target(
        module="vllm.config.vllm",
        symbol="VllmConfig.__post_init__",
        gives="lifecycle",
        instead="the engine id comes from its instance id, which may repeat after 1M engines",
    ),
    Target(
        module="vllm.config.vllm",
        symbol="VllmConfig.compute_hash",
        parameters=("include_version",),
        gives="routes",
        instead="code compiled without a recording may be loaded: set VLLM_DISABLE_COMPILE_CACHE=1",
    ),
    Target(
        module="vllm.engine.arg_utils",
        symbol="EngineArgs.create_engine_config",
        gives="settings",
        instead="settings in force, but not those that were asked for",
    ),
    Target(
        module=_OUTPUTS,
        symbol="OutputProcessor.add_request",
        parameters=("request", "prompt", "parent_req", "request_index"),
        gives="lifecycle",
        instead="sequences have no group, no caller's id and no end",
    ),
    Target(
        module=_OUTPUTS,
        symbol="OutputProcessor.process_outputs",
        parameters=("engine_core_outputs",),
        gives="lifecycle",
        instead="sequences stay open",
    ),
    Target(
        module=_OUTPUTS,
        symbol="OutputProcessor.abort_requests",
        parameters=("request_ids",),
        gives="lifecycle",
        instead="aborted sequences stay open",
    ),
    Target(
        module="vllm.v1.engine.llm_engine",
        symbol="LLMEngine.__init__",
        parameters=("vllm_config",),
        gives="lifecycle",
    ),
    Target(
        module="vllm.v1.engine.async_llm",
        symbol="AsyncLLM.__init__",
        parameters=("vllm_config",),
        gives="lifecycle",
    ),
    Target(
        module="vllm.v1.engine.core",
        symbol="EngineCore.set_weight_version",
        parameters=("weight_version",),
        gives="weights",
        instead="versions have numbers but not the name that the job gives them",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner.load_model",
        gives="settings",
        instead="nothing is recorded in the worker",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner._dummy_run",
        parameters=("num_tokens", "cudagraph_runtime_mode"),
        gives="tactics",
        instead="choices made in a capture do not say for which graph",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner.execute_model",
        parameters=("scheduler_output",),
        gives="schedule",
        instead="nothing is recorded in the worker",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner._model_forward",
        parameters=("input_ids", "positions"),
        gives="schedule",
        instead="nothing is recorded in the worker",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner._sample",
        parameters=("logits", "spec_decode_metadata"),
        gives="tokens",
        instead="no tokens, logprobs and supports",
    ),
    Target(
        module=_RUNNER,
        symbol="GPUModelRunner._get_prompt_logprobs_dict",
        gives="logprobs",
        instead="no logprobs of prompts that the job had scored",
    ),
    Target(
        module="vllm.v1.sample.ops.topk_topp_sampler",
        symbol="apply_top_k_top_p",
        parameters=("logits", "k", "p"),
        gives="supports",
        instead="kept sets and processed logprobs are not recorded",
    ),
    Target(
        module="vllm.model_executor.layers.fused_moe.runner.moe_runner",
        symbol="MoERunner",
        gives="routes",
        instead="no routes",
    ),
    Target(
        module="vllm.model_executor.layers.fused_moe.router.base_router",
        symbol="BaseRouter.set_capture_fn",
        parameters=("capture_fn",),
        gives="routes",
        instead="no routes",
    ),
    Target(
        module=_RUNNER_2,
        symbol="GPUModelRunner.prepare_inputs",
        gives="schedule",
        instead="the second model runner is not recorded",
    ),
    Target(
        module=_RUNNER_2,
        symbol="GPUModelRunner.execute_model",
        parameters=("scheduler_output",),
        gives="schedule",
        instead="the second model runner is not recorded",
    ),
    Target(
        module=_RUNNER_2,
        symbol="GPUModelRunner.sample",
        parameters=("hidden_states", "input_batch"),
        gives="tokens",
        instead="the second model runner shows no tokens",
    ),
    Target(
        module="vllm.v1.worker.gpu.cudagraph_utils",
        symbol="CudaGraphManager.capture",
        parameters=("create_forward_fn",),
        gives="tactics",
        instead="choices made in a capture do not say for which graph",
    ),
    Target(
        module=_SAMPLER_2,
        symbol="Sampler.sample",
        parameters=("logits",),
        gives="supports",
        instead="kept sets and processed logprobs of the second runner are not recorded",
    ),
    Target(
        module=_WORKER,
        symbol="WorkerBase.shutdown",
        gives="lifecycle",
        instead="the last second of a worker that is killed is lost",
    ),
)
