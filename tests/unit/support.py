"""Fakes that several areas share: a scripted command runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result

Answer = Result | tuple[int, str, str] | str | Callable[[Sequence[str]], Any]


class ScriptedRunner:
    """Answers commands by the longest matching argv prefix and remembers the calls; an unknown command is rc 127."""

    def __init__(self, answers: Mapping[tuple[str, ...], Answer] | None = None) -> None:
        self.answers = dict(answers or {})
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        data: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        self.calls.append((list(argv), {"timeout": timeout, "data": data, "env": env}))
        for length in range(len(argv), 0, -1):
            if tuple(argv[:length]) in self.answers:
                return _result(self.answers[tuple(argv[:length])], argv)
        return Result(127, "", f"{argv[0]}: no such command in this script")


def _result(answer: Answer, argv: Sequence[str]) -> Result:
    if callable(answer) and not isinstance(answer, tuple):
        answer = answer(argv)
    if isinstance(answer, str):
        return Result(0, answer, "")
    return Result(*answer)  # type: ignore[misc]
