"""Weight updates in several calls."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._ray_utils import control_action_decorator

#: Uuid of the one device of the double.
_double_device = "GPU-double-0"


def _double_nothing() -> None:
    """Stands for a hook that a module does not have."""


class WorkerExtension:
    """A mixin of the worker: `self.engine` is the `PyExecutor`."""

    @control_action_decorator
    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Loads a part, a list of (name, (function, args)) under the device; None finishes."""
        model = self.engine.model_engine.model
        if not hasattr(model, "first_pre_reload_weights"):
            for module in model.modules():
                if hasattr(module, "pre_reload_weights"):
                    module.pre_reload_weights()
            model.first_pre_reload_weights = True
        if ipc_handles is None:
            for module in model.modules():
                for hook in ("process_weights_after_loading", "post_load_weights"):
                    getattr(module, hook, _double_nothing)()
            self.engine.reset_prefix_cache()
            del model.first_pre_reload_weights
            return
        if _double_device not in ipc_handles:
            raise ValueError(f"Device UUID {_double_device} not found in ipc_handles")
        handles = ipc_handles[_double_device]
        weights = {name: function(*args) for name, (function, args) in handles}
        loader = self.engine.model_engine.model_loader
        loader.reload(model, weights, allow_partial_loading=True)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
