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
    core = interpreter.tl.core
    for made in (core.block_type, core.tensor):
        monkeypatch.setattr(made, "__init__", made.__init__.__wrapped__)
    monkeypatch.setattr(core.block_type, "__new__", lambda cls, *_: object.__new__(cls))
    assert builder.options.sanitize_overflow
    as_it_is = run(name, leaves, inputs, grads, **options)
    assert all(light[key].equal(as_it_is[key]) for key in KEYS)


@pytest.mark.skipif(CUDA, reason="the interpreter does not run")
def test_a_type_is_made_once_and_says_the_same() -> None:
    from triton.runtime import interpreter

    core = interpreter.tl.core
    for shape in ([16], [16, 32], [core.constexpr(64), 16]):
        one, other = (core.block_type(core.float32, shape) for _ in range(2))
        assert (
            one is other and one.shape == tuple(getattr(n, "value", n) for n in shape) and one is not core.block_type(core.float16, shape)
        )
        a, b = core.tensor("a", one), core.tensor("b", one)
        assert (a.handle, b.handle) == ("a", "b") and a.shape is b.shape and [n.value for n in a.shape] == list(one.shape)
    pointer = core.pointer_type(core.float32)
    assert core.block_type(pointer, [16]) is not core.block_type(pointer, [16])
