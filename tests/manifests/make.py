"""Writes a manifest of an engine's symbols from its source, without importing it.

    python tests/manifests/make.py ENGINE SOURCE_FOLDER --source owner/name@commit [--partial]

ENGINE is the name of an adapter (`rolltape.recorder.ENGINE.targets` lists the targets in TARGETS);
SOURCE_FOLDER holds the engine's package, directly or below `python/` or `src/`. The answer goes to
`tests/manifests/ENGINE.json`, which holds an entry for each source; the entry of this one is
replaced. `ENGINE.also`, a `module:symbol` a line, names what only the engine's double needs.

With `--partial` the folder holds some files of that commit: a module without a file there is then
left out, as not read. Without it such a module is absent. A file that begins with the line
`# excerpt` holds some definitions of the real one, bodies left out: it is listed under `excerpts`,
with no hash, and what is not in it is left out as well, unless the line goes on with
`; complete: Class ...`: what such a class lacks, or that there is no such class, is then known.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Bases by which a class without `__init__` takes its annotated names as parameters.
_MODELS = ("BaseModel", "StrictBaseModel", "Struct", "NamedTuple")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition and the module it stands in."""

    module: str
    node: ast.AST


@dataclass
class Source:
    """Python files below a folder, parsed when they are asked for."""

    root: Path
    trees: dict[str, ast.Module | None] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """The parsed file of a module; None if there is none."""
        if module not in self.trees:
            self.trees[module] = self._parse(module)
        return self.trees[module]

    def path(self, module: str) -> str:
        """The file of a module, relative to the folder."""
        return next(name for name, owner in self.files.items() if owner == module)

    def excerpt(self, module: str) -> list[str] | None:
        """Classes that an excerpt holds whole; None if the file is not an excerpt."""
        if self.tree(module) is None:
            return None
        with open(self.root / self.path(module), encoding="utf-8") as file:
            line = file.readline()
        if not line.startswith("# excerpt"):
            return None
        return [name.partition(".")[0] for name in line.partition("complete:")[2].split()]

    def _parse(self, module: str) -> ast.Module | None:
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            if (self.root / name).is_file():
                self.files[name] = module
                return ast.parse((self.root / name).read_bytes(), filename=name)
        return None

    def find(self, module: str, symbol: str, depth: int = 0) -> Found | None:
        """The definition of a dotted symbol, through re-exports and base classes."""
        tree = self.tree(module)
        if tree is None or depth > 8:
            return None
        found: Found | None = Found(module, tree)
        for part in symbol.split(".") if symbol else ():
            found = self._member(found, part, depth)
            if found is None:
                return None
        return found

    def _member(self, owner: Found, name: str, depth: int) -> Found | None:
        for node in definitions(owner.node):
            if name in bound_names(node):
                return Found(owner.module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._imported(owner.module, node), alias.name, depth + 1)
        if isinstance(owner.node, ast.ClassDef):
            if name in attributes(owner.node):
                return Found(owner.module, ast.Name(id=name))
            for base in self.bases(owner, depth):
                found = self._member(base, name, depth + 1)
                if found is not None:
                    return found
        return None

    def bases(self, owner: Found, depth: int = 0) -> Iterator[Found]:
        """Base classes of a class that stand in the folder."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.find(owner.module, name, depth + 1)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        package = parts if self.path(module).endswith("__init__.py") else parts[:-1]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *([node.module] if node.module else [])])


def definitions(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` included, last first.

    The last definition of a name is the one that counts.
    """
    bodies = ("orelse", "finalbody", "handlers", "body")
    for name in bodies:
        for child in reversed(getattr(node, name, [])):
            if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from definitions(child)
            elif isinstance(child, ast.stmt):
                yield child


def bound_names(node: ast.stmt) -> set[str]:
    """Names that a definition or an assignment binds."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    return set()


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that methods of a class assign on `self`, and its `__slots__`."""
    found: set[object] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            if isinstance(child.value, ast.Name) and child.value.id == "self":
                found.add(child.attr)
        elif isinstance(child, ast.Assign) and "__slots__" in bound_names(child):
            slots = child.value
            found |= {e.value for e in ast.walk(slots) if isinstance(e, ast.Constant)}
    return {name for name in found if isinstance(name, str)}


def parameters(node: Function) -> list[str]:
    """Names as written, `*` and `**` in front of those that collect."""
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [p.arg for p in a.kwonlyargs]
    return names + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def describe(source: Source, module: str, symbol: str) -> dict[str, Any]:
    """The manifest's entry of one symbol."""
    found = source.find(module, symbol)
    if found is None:
        missing = source.tree(module) is None
        return {"kind": "absent", "why": "no such module" if missing else "not in the module"}
    node, entry = found.node, {"file": source.path(found.module)}
    if isinstance(node, Function):
        kind = "method" if "." in symbol else "function"
        decorators = {ast.unparse(d) for d in node.decorator_list}
        kind = "property" if decorators & {"property", "cached_property"} else kind
        return {"kind": kind, **entry, "parameters": parameters(node)}
    if isinstance(node, ast.ClassDef):
        return {"kind": "class", **entry, **_class(source, found)}
    if isinstance(node, ast.Module):
        return {"kind": "module", **entry}
    return {"kind": "field" if "." in symbol else "name", **entry}


def _class(source: Source, found: Found, depth: int = 0) -> dict[str, Any]:
    node = found.node
    assert isinstance(node, ast.ClassDef)
    fields: dict[str, None] = {}
    methods: dict[str, list[str]] = {}
    taken = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    taken |= any(ast.unparse(b).rpartition(".")[2] in _MODELS for b in node.bases)
    for base in source.bases(found) if depth < 8 else ():
        below = _class(source, base, depth + 1)
        fields |= dict.fromkeys(below["fields"])
        methods |= below["methods"]
        taken |= below["by_fields"]
    for child in reversed(list(definitions(node))):
        if isinstance(child, ast.AnnAssign) and "ClassVar" not in ast.unparse(child.annotation):
            fields[ast.unparse(child.target)] = None
        elif isinstance(child, ast.Assign):
            fields |= dict.fromkeys(n for n in bound_names(child) if not n.startswith("_"))
        elif isinstance(child, Function):
            methods[child.name] = parameters(child)
    made = methods.get("__init__", ["self", *fields] if taken else ["self"])
    own = sorted(attributes(node) - {"__slots__"})
    result: dict[str, Any] = {"parameters": made, "fields": list(fields), "methods": methods}
    if depth:
        return {**result, "by_fields": taken and "__init__" not in methods, "attributes": own}
    public = {n: p for n, p in sorted(methods.items()) if not n.startswith("__")}
    return {**result, "methods": public, "attributes": own}


def make(engine: str, folder: Path, *, partial: bool) -> dict[str, Any]:
    """The manifest's entry of one source.

    Args:
        engine: adapter whose targets are looked for.
        folder: source of the engine.
        partial: whether the folder holds only some of the files.

    Raises:
        SystemExit: the folder does not hold the engine's package.
    """
    wanted = targets(engine)
    package = wanted[0][0].partition(".")[0]
    roots = [folder / part for part in ("", "python", "src") if (folder / part / package).is_dir()]
    if not roots:
        raise SystemExit(f"{folder} has no folder {package}, python/{package} or src/{package}")
    source = Source(roots[0])
    symbols = {}
    for module, symbol in wanted:
        if partial and source.tree(module) is None:
            continue
        entry = describe(source, module, symbol)
        known = source.excerpt(module)
        if entry["kind"] != "absent" or known is None or symbol.partition(".")[0] in known:
            symbols[f"{module}:{symbol}" if symbol else module] = entry
    read = sorted(name for name, owner in source.files.items() if source.excerpt(owner) is None)
    digests = {name: hashlib.sha256((source.root / name).read_bytes()).hexdigest() for name in read}
    excerpts = sorted(set(source.files) - set(read))
    return {"partial": partial, "files": digests, "excerpts": excerpts, "symbols": symbols}


def targets(engine: str) -> list[tuple[str, str]]:
    """Module and symbol of every target, and of what the double needs besides."""
    adapter = importlib.import_module(f"rolltape.recorder.{engine}.targets")
    wanted = {(target.module, target.symbol) for target in adapter.TARGETS}
    also = HERE / f"{engine}.also"
    for line in also.read_text().split() if also.is_file() else ():
        module, _, symbol = line.partition(":")
        wanted.add((module, symbol))
    return sorted(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a manifest of an engine's symbols.")
    parser.add_argument("engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", required=True, metavar="owner/name@commit")
    parser.add_argument("--partial", action="store_true", help="the folder has only some files")
    options = parser.parse_args()
    path = HERE / f"{options.engine}.json"
    old = json.loads(path.read_text()) if path.is_file() else {"sources": {}}
    entry = make(options.engine, options.folder, partial=options.partial)
    sources = {**old["sources"], options.source: entry}
    manifest = {"engine": options.engine, "sources": dict(sorted(sources.items()))}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    kinds = [symbol["kind"] for symbol in entry["symbols"].values()]
    print(f"{path.name}: {len(kinds)} symbols of {options.source}, {kinds.count('absent')} absent")


if __name__ == "__main__":
    main()
