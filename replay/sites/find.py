"""The sites of a model: its family's map, laid over its module tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from rolltape.replay.sites.places import Family, Place
from rolltape.store.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

Engine = Literal["transformers", "vllm"]

_FILES = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "qwen3_next",
    "qwen3",
    "llama",
)


def known_families(engine: Engine = "transformers") -> dict[str, Family]:
    """The map of each `model_type` that has one."""
    maps = [
        getattr(import_module(f"rolltape.replay.sites.{name}"), engine.upper()) for name in _FILES
    ]
    return {type_: family for family in maps if family is not None for type_ in family.types}


def sites_of(model: nn.Module, engine: Engine = "transformers") -> dict[str, Place]:
    """Every site of a model, in the order in which they run.

    Args:
        model: a causal language model of the engine, maybe wrapped.
        engine: whose module tree it is.

    Raises:
        UsageError: no map for this family in this engine, or a tree that it does not fit.
    """
    config: Any = model.config
    type_, families = config.model_type, known_families(engine)
    if type_ not in families:
        raise UsageError(
            f"no map of sites for model type {type_!r} in {engine}", hint=", ".join(families)
        )
    family, modules = families[type_], dict(model.named_modules())
    prefix = _prefix(modules, family)
    found = dict(_resolved(modules, prefix, family.before))
    path = f"{prefix}{family.layers}"
    numbers = [name.removeprefix(f"{path}.") for name in modules if name.startswith(f"{path}.")]
    for number in sorted({int(n) for n in numbers if n.isdecimal()}):
        for site, place in _resolved(modules, f"{path}.{number}.", family.layer):
            found[f"layers.{number}.{site}"] = place
    found.update(_resolved(modules, prefix, family.after))
    return found


def select_sites(sites: Iterable[str], patterns: str | Iterable[str]) -> list[str]:
    """The sites that some pattern names, in their order.

    Args:
        sites: all there are.
        patterns: `layers.*.out,logits` or a list of such patterns; `*` is any run of characters.

    Raises:
        UsageError: a pattern names none of them.
    """
    split = patterns.split(",") if isinstance(patterns, str) else list(patterns)
    wanted = [p.strip() for p in split if p.strip()]
    every = list(sites)
    for pattern in wanted:
        if not any(fnmatchcase(site, pattern) for site in every):
            shown = ", ".join(dict.fromkeys(_general(site) for site in every))
            raise UsageError(f"no site {pattern!r} in this model", hint=shown)
    if not wanted:
        raise UsageError("no sites", hint="layers.*.out,logits")
    return [site for site in every if any(fnmatchcase(site, p) for p in wanted)]


def _general(site: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in site.split("."))


def _prefix(modules: Mapping[str, Any], family: Family) -> str:
    """What wrappers put before the paths of the causal model."""
    first = next(iter(family.before.values())).module
    found = [path for path in modules if path == first or path.endswith(f".{first}")]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} modules called {first}", hint="a causal language model of one text part"
        )
    return found[0].removesuffix(first)


def _resolved(
    modules: Mapping[str, Any], prefix: str, sites: Mapping[str, Place | tuple[Place, ...]]
) -> Iterable[tuple[str, Place]]:
    for site, given in sites.items():
        for place in given if isinstance(given, tuple) else (given,):
            path = f"{prefix}{place.module}".removesuffix(".")
            if path in modules:
                yield site, place.resolve(path, modules.get(path.rpartition(".")[0]))
                break
