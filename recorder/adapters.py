"""Which adapters of a PEFT model are in force: several can be loaded, all can be switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def adapters_in_force(model: nn.Module) -> dict[str, frozenset[str]]:
    """Names of the adapters that take part, for each module that can have some, by its path.

    Empty for a model without adapters. Recognised by structure, as PEFT's layers are: a flag
    `disable_adapters` and a list `active_adapters`.
    """
    found = {}
    for path, module in model.named_modules():
        off = getattr(module, "disable_adapters", None)
        if isinstance(off, bool):
            active = () if off else getattr(module, "active_adapters", ())
            found[path] = frozenset(active)
    return found


def is_dormant(name: str, in_force: dict[str, frozenset[str]]) -> bool:
    """Whether a weight takes no part: of an adapter that is off, or replaced by one that is on.

    Args:
        name: of a parameter, as the model's modules have it.
        in_force: from `adapters_in_force`.
    """
    path = name.split(".")
    for index, element in enumerate(path[:-1]):
        active = in_force.get(".".join(path[:index]))
        if active is None:
            continue
        if element == "original_module":  # an adapter brings a trained copy of it
            return bool(active)
        if element.startswith("lora_") or element == "modules_to_save":
            return path[index + 1] not in active
    return False
