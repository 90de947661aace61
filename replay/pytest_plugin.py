"""A pytest plugin: the determinism suite as tests, one for each case.

    pytest --rolltape-engine transformers --rolltape-model PATH [--rolltape-case NAME ...]

It does nothing without `--rolltape-engine`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rolltape.replay.verify import CaseResult, Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `rolltape verify`."""
    group = parser.getgroup("rolltape", "determinism of an inference engine")
    group.addoption("--rolltape-engine", metavar="ENGINE", help="transformers | vllm")
    group.addoption("--rolltape-model", metavar="PATH", help="checkpoint that is run")
    group.addoption("--rolltape-case", action="append", default=[], metavar="NAME",
                    help="only this case; may be repeated")  # fmt: skip
    group.addoption("--rolltape-prompts", type=int, default=16, metavar="N")
    group.addoption("--rolltape-tokens", type=int, default=32, metavar="N")
    group.addoption("--rolltape-length", type=int, metavar="N")
    group.addoption("--rolltape-dtype", metavar="D")
    group.addoption("--rolltape-device", metavar="D")


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add an item for each case."""
    if config.getoption("--rolltape-engine"):
        items.extend(_items(session, config))


def _items(session: pytest.Session, config: pytest.Config) -> Iterable[pytest.Item]:
    from rolltape.replay.verify.cases import CASES, CONTROL

    if not config.getoption("--rolltape-model"):
        raise pytest.UsageError("--rolltape-engine needs --rolltape-model PATH")
    asked = config.getoption("--rolltape-case")
    for name in asked:
        if name not in CASES:
            raise pytest.UsageError(f"--rolltape-case {name}: {' | '.join(CASES)}")
    suite = _Suite(config)
    for name in CASES:
        if not asked or name in asked or name == CONTROL:
            yield _Case.from_parent(session, name=f"rolltape-{name}", suite=suite, case=name)


class _Suite:
    """The report, made when the first case needs it: the cases share one engine."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._report: Report | None = None
        self._error: Exception | None = None

    def result(self, name: str) -> CaseResult:
        if self._error is not None:
            raise self._error
        if self._report is None:
            try:
                self._report = self._run()
            except Exception as error:
                self._error = error
                raise
        return next(case for case in self._report.cases if case.case == name)

    def _run(self) -> Report:
        from rolltape.replay.verify import verify

        option = self._config.getoption
        return verify(
            option("--rolltape-engine"),
            option("--rolltape-model"),
            cases=option("--rolltape-case"),
            prompts=option("--rolltape-prompts"),
            tokens=option("--rolltape-tokens"),
            length=option("--rolltape-length"),
            dtype=option("--rolltape-dtype"),
            device=option("--rolltape-device"),
        )


class _FailedError(Exception):
    """A case that failed; the text is the first difference."""


class _Case(pytest.Item):
    def __init__(self, *, suite: _Suite, case: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._suite, self._case = suite, case

    def runtest(self) -> None:
        from rolltape.replay.verify.output import details

        result = self._suite.result(self._case)
        if result.verdict == "not-run":
            if result.missed:
                raise _FailedError(f"not run: {result.reason}")
            pytest.skip(f"not run: {result.reason}")
        if result.verdict == "failed":
            raise _FailedError(details(result))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        from rolltape.store.errors import RolltapeError

        if isinstance(excinfo.value, _FailedError | RolltapeError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path("rolltape"), None, f"rolltape verify: {self._case}"
