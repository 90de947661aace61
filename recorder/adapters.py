"""Which adapters of a PEFT model are in force: several can be loaded, all can be switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: What a layer with adapters calls the module that it was put around.
_BASE = ("base_layer", "original_module")
#: What a model holds the prompts in that were learned for it.
PROMPTS = "prompt_encoder"
#: Containers of whole modules that stand in for that one, rather than add to it.
_REPLACING = ("modules_to_save", "ln_tuning_layers")


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A module whose adapters can be chosen.

    Args:
        active: names of the adapters that take part.
        names: of all adapters, where the module is a container that holds one thing for each.
        replaces: a module that has an adapter in force does not use what it was put around.
    """

    active: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    replaces: bool = False


def adapters_in_force(model: nn.Module) -> dict[str, Switch]:
    """What is switched how, for each module that has adapters or holds those of one, by its path.

    Empty for a model without adapters. Recognised by structure, as PEFT's layers are: a flag
    `disable_adapters`, a list `active_adapters`, and the names of their containers. The prompts of
    a `PeftModel` have none of these; it puts them aside by calling its base model itself.
    """
    found: dict[str, Switch] = {}
    for path, module in model.named_modules():
        off = getattr(module, "disable_adapters", None)
        if isinstance(off, bool):
            chosen = () if off else getattr(module, "active_adapters", ())
            active, listed = frozenset(chosen), _containers(module)
            replaces = bool({name for name, _ in listed}.intersection(_REPLACING))
            found[path] = Switch(active=active, replaces=replaces)
            for name, names in listed:
                found[_joined(path, name)] = Switch(active=active, names=names)
        prompts: Any = module._modules.get(PROMPTS)
        if prompts is not None and hasattr(prompts, "keys"):
            chosen = () if _without_prompts(module) else (getattr(module, "active_adapter", ""),)
            names = frozenset(prompts.keys())
            found[_joined(path, PROMPTS)] = Switch(active=frozenset(chosen), names=names)
    return found


def is_dormant(name: str, in_force: dict[str, Switch]) -> bool:
    """Whether a weight takes no part: of an adapter that is off, or replaced by one that is on.

    A weight that cannot be placed counts as one that takes part.

    Args:
        name: of a parameter, as the model's modules have it.
        in_force: from `adapters_in_force`.
    """
    path = name.split(".")
    for index, element in enumerate(path):
        switch = in_force.get(".".join(path[:index]))
        if switch is None:
            continue
        if switch.names:
            if element in switch.names - switch.active:
                return True
        elif element in _BASE:
            if switch.replaces and switch.active:  # an adapter brings a trained copy of it
                return True
        elif not switch.active and not _decides(".".join(path[: index + 1]), in_force):
            return True
    return False


def unplaced_reason(name: str, model: nn.Module) -> str | None:
    """Why it is not known whether a weight takes part; None if it is.

    Beside the model that it was put into, a tuner may keep what several of its layers use, or what
    chooses among them: nothing there says when it does.

    Args:
        name: of a parameter, as the model's modules have it.
        model: that has it.
    """
    path = name.split(".")
    here: Any = model
    for element in path[:-1]:
        tuner = hasattr(here, "targeted_module_names") and "model" in here._modules
        if tuner and element != "model":
            return "of adapters as a whole: whether it takes part is not known"
        here = here._modules.get(element)
        if here is None:
            return None
    return None


def _containers(module: nn.Module) -> list[tuple[str, frozenset[str]]]:
    """What of a layer is kept for each adapter: (path below it, names of adapters)."""
    found = []
    for listed in ("adapter_layer_names", "other_param_names"):
        for name in getattr(module, listed, ()):
            held: Any = module
            for element in name.split("."):
                held = getattr(held, "_modules", {}).get(element)
            if hasattr(held, "keys"):
                found.append((name, frozenset(held.keys())))
    return found


def _decides(path: str, in_force: dict[str, Switch]) -> bool:
    """Whether a module below another with a switch has one of its own, for what it was put around.

    As the adapter of single tokens has, in the wrapper of an embedding.
    """
    switch = in_force.get(path)
    return switch is not None and not switch.names


def _without_prompts(module: Any) -> bool:
    if getattr(module, "_adapters_disabled", False):
        return True
    forward = vars(module).get("forward")
    return forward is not None and forward == getattr(module.base_model, "forward", None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
