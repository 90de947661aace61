"""Calls the recorder once an engine has been imported, and costs nothing until then.

Loaded at the start of every Python process of a recorded job, in whatever interpreter that is
(3.7 or newer), so: standard library only, and of that only what the interpreter has loaded
anyway. `rolltape` itself is imported when an engine is. No fault in here reaches the job, unless
ROLLTAPE_STRICT is 1.
"""

import os
import sys
import time
from _thread import get_ident

TYPE_CHECKING = False  # the one in `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

#: module of an engine -> "module:function", called once that module has been executed.
HOOKS = {
    "flashinfer.autotuner": "rolltape.recorder.tactics.bind:bind",
    "ray._private.worker": "rolltape.recorder.ray:bind",
    "sglang.srt.managers.tokenizer_manager": "rolltape.recorder.sglang.adapter:bind",
    "tensorrt_llm._torch.autotuner": "rolltape.recorder.tactics.bind:bind",
    "tensorrt_llm._torch.pyexecutor.cuda_graph_runner": (
        "rolltape.recorder.tensorrt_llm.worker:bind_graphs"
    ),
    "tensorrt_llm._torch.pyexecutor.llm_request": (
        "rolltape.recorder.tensorrt_llm.worker:bind_request"
    ),
    "tensorrt_llm._torch.pyexecutor.model_loader": (
        "rolltape.recorder.tensorrt_llm.worker:bind_loader"
    ),
    "tensorrt_llm._torch.pyexecutor.py_executor": "rolltape.recorder.tensorrt_llm.worker:bind_loop",
    "tensorrt_llm.executor.executor": "rolltape.recorder.tensorrt_llm.bind:bind_executor",
    "tensorrt_llm.executor.result": "rolltape.recorder.tensorrt_llm.bind:bind_result",
    "tensorrt_llm.llmapi.llm": "rolltape.recorder.tensorrt_llm.bind:bind_llm",
    "torch._inductor.select_algorithm": "rolltape.recorder.tactics.bind:bind",
    "transformers.generation.utils": "rolltape.recorder.transformers:bind",
    "triton.runtime.autotuner": "rolltape.recorder.tactics.bind:bind",
    "trl.trainer.grpo_trainer": "rolltape.recorder.trl:bind",
    "vllm.config.vllm": "rolltape.recorder.vllm:bind_config",
    "vllm.engine.arg_utils": "rolltape.recorder.vllm.arguments:bind",
    "vllm.v1.engine.async_llm": "rolltape.recorder.vllm.frontend:bind_engine",
    "vllm.v1.engine.core": "rolltape.recorder.vllm.core:bind",
    "vllm.v1.engine.llm_engine": "rolltape.recorder.vllm.frontend:bind_engine",
    "vllm.v1.engine.output_processor": "rolltape.recorder.vllm.frontend:bind",
    "vllm.v1.worker.cpu_model_runner": "rolltape.recorder.vllm.worker:bind_cpu",
    "vllm.v1.worker.gpu.model_runner": "rolltape.recorder.vllm.worker_v2:bind",
    "vllm.v1.worker.gpu_model_runner": "rolltape.recorder.vllm.worker:bind",
    "vllm.v1.worker.worker_base": "rolltape.recorder.vllm.worker:bind_worker",
}

_started = False
_said: "set[str]" = set()


def start() -> None:
    """Leave a heartbeat in the tape and watch for engines. A second call does nothing."""
    global _started
    if not _started:
        _started = True
        if os.environ.get("ROLLTAPE_JOINED_PATH"):
            _mend_path()
        _leave_heartbeat()
        watch(HOOKS)


def watch(hooks: "Mapping[str, str]") -> None:
    """Call each target once its module is imported; at once if it is already.

    Args:
        hooks: module name -> "module:function".
    """
    for name, target in hooks.items():
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            _finder.pending[name] = target
        else:
            _call(target)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def unwatch(hooks: "Mapping[str, str]") -> None:
    """Inverse of `watch`: what was called is undone by the `unbind` of its module."""
    for name in hooks:
        _finder.pending.pop(name, None)
    for module in {target.partition(":")[0] for target in hooks.values()}:
        unbind = getattr(sys.modules.get(module), "unbind", None)
        if unbind is not None:
            unbind()


class _Finder:
    """Asks the other finders, and puts a `_Loader` around what they give for a watched name.

    It stays in `sys.meta_path` when nothing is pending: taking it out could make another thread,
    which is walking that list, skip the finder behind it.
    """

    def __init__(self) -> None:
        self.pending: dict[str, str] = {}
        self._busy: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec for a watched module, None for all others."""
        search = (get_ident(), name)
        if name not in self.pending or search in self._busy:
            return None
        self._busy.add(search)  # another hook may ask `importlib.util.find_spec`, hence us
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(name, path, target) if find else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, name)  # type: ignore[assignment]
                    return spec
        finally:
            self._busy.discard(search)
        return None


class _Loader:
    """Stands in for a loader until it executes the module; then the module has its own again."""

    def __init__(self, loader: "Any", name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, attribute: str) -> "Any":
        if attribute == "_loader":  # half-made by copy or pickle
            raise AttributeError(attribute)
        return getattr(self._loader, attribute)

    def create_module(self, spec: "ModuleSpec") -> "Any":
        """As the real loader does."""
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module, then its hook; a module that fails to import stays watched."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        target = _finder.pending.pop(self._name, None)
        if target is not None:
            _call(target)


_finder = _Finder()


def _call(target: str) -> None:
    module, _, function = target.partition(":")
    try:
        _mend_package(module.partition(".")[0])
        __import__(module)
        getattr(sys.modules[module], function)()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a recorder may not end the job, not even by sys.exit
        package = module.partition(".")[0]
        if isinstance(error, ImportError) and error.name == package:
            text = f"{package} is not importable by {sys.executable}; its work is not recorded"
        else:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
            kind = type(error).__name__
            text = f"{target} failed: {kind}: {error} ({where}); the job goes on, unrecorded"
        text = " ".join(text.split())
        _say_once(target, text)
        if os.environ.get("ROLLTAPE_STRICT") == "1":
            raise RuntimeError("rolltape: " + text) from error


def _mend_path() -> None:
    """Take the working folder out of the path again, if only an empty entry put it there.

    Ray joins our folder and the PYTHONPATH of the worker's machine, and cannot leave out the
    separator where that has none.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entries != [here, ""]:
        return
    os.environ["PYTHONPATH"] = here
    after = [i + 1 for i, entry in enumerate(sys.path[:-1]) if entry == here]
    if after and sys.path[after[0]] == os.getcwd():
        del sys.path[after[0]]


def _mend_package(name: str) -> None:
    """A folder called `rolltape` beside the script must not stand in for an editable install.

    Python takes such a folder, a clone for example, for a namespace package, and asks the finder
    of the editable install only after that.
    """
    path = os.environ.get("ROLLTAPE_PACKAGE", "")
    if name != "rolltape" or not os.path.isfile(path):
        return
    try:
        package = __import__(name)
    except ImportError:
        return  # said by the import of the target
    if getattr(package, "__file__", None) is None:
        from importlib.util import module_from_spec, spec_from_file_location

        folder = os.path.dirname(path)
        spec = spec_from_file_location(name, path, submodule_search_locations=[folder])
        if spec is not None and spec.loader is not None:
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


def _say_once(about: str, text: str) -> None:
    """One line for the whole job: the first process to leave the note is the one that prints."""
    if about in _said:
        return
    _said.add(about)
    name = "note-" + "".join(c if c.isalnum() else "-" for c in about)
    facts: dict[str, str | int] = {
        "pid": os.getpid(),
        "t_ns": time.time_ns(),
        "about": about,
        "text": text,
    }
    if _leave(name, facts) is False:
        return
    try:
        sys.stderr.write("rolltape: " + text + "\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # no stderr: nobody is there to be told
        return


def _leave_heartbeat() -> None:
    argv = getattr(sys, "orig_argv", None) or [sys.executable]  # 3.10
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
    now = time.time_ns()
    facts: dict[str, str | int] = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "host": os.uname().nodename,
        "executable": sys.executable,
        "argv0": (getattr(sys, "argv", None) or argv)[0],
        "start_ns": now,
        "helper": any(helper in arg for arg in argv for helper in helpers),
    }
    _leave(f"{os.getpid()}-{now}", facts)


def _leave(name: str, facts: "Mapping[str, str | int]") -> "bool | None":
    """Write a small file into the tape; False if it is there already, None if that failed."""
    # a tape in an object store has a folder on the launcher's machine for this
    folder = os.environ.get("ROLLTAPE_PROCS") or os.path.join(
        os.environ.get("ROLLTAPE_TAPE", ""), "procs"
    )
    path = os.path.join(folder, name)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    except OSError:  # read-only, full or gone: the launcher counts one process too few
        return None
    try:
        os.write(file, _json(facts).encode("ascii"))
    except OSError:
        return None
    finally:
        os.close(file)
    return True


def _json(facts: "Mapping[str, str | int]") -> str:
    # `json` would double the start-up time
    return "{" + ", ".join(_quote(key) + ": " + _cell(facts[key]) for key in facts) + "}\n"


def _cell(value: "str | int") -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quote(value)


def _quote(text: str) -> str:
    return '"' + "".join(_escape(ord(c)) for c in text) + '"'


def _escape(code: int) -> str:
    if 32 <= code < 127 and code not in (34, 92):
        return chr(code)
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
