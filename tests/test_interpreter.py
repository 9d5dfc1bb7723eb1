"""What attngen/interpreter.py takes out of Triton's interpreter changes no result."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.testing import KEYS
from tests.conftest import CUDA
from tests.test_numerics import problem, run, small


@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
@pytest.mark.parametrize("name", ["causal_dropout_mqa", "padding_mha"])
def test_results_are_the_same_to_the_bit(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    leaves, inputs, grads = problem(name, small(name, 40, 70), device)
    options: dict[str, Any] = {"dropout_p": 0.2, "seed": 7} if "dropout" in name else {}
    light = run(name, leaves, inputs, grads, **options)
    builder = interpreter.interpreter_builder
    assert not builder.options.sanitize_overflow and not builder.options.debug, "debug alone asserts what sanitize_overflow computes"
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())
    monkeypatch.setattr(interpreter, "_get_np_dtype", interpreter._get_np_dtype.__wrapped__)
    monkeypatch.setattr(interpreter, "_patch_builtin", interpreter._patch_builtin.__wrapped__)
    assert builder.options.sanitize_overflow
    as_it_is = run(name, leaves, inputs, grads, **options)
    assert all(light[key].equal(as_it_is[key]) for key in KEYS)
