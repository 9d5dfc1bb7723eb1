"""Arguments of masks and score modifiers: wrong ones get one sentence, and other integer and float types are
converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngen.conformance.cases import make_inputs
from tests.mask_specs import Built, builder, case, ints, spec

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Modules of the specs, each built once."""
    return builder(tmp_path_factory.mktemp("masks"))


Arguments = dict[str, Any]
# (spec, change of the arguments, class of the error, its sentence)
WRONG: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], str]] = [
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"].short()},
        TypeError,
        "document_ids is torch.int16; expected torch.int32 or torch.int64 [2, 50]: ",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"][:, :40]},
        ValueError,
        "document_ids has shape [2, 40]; expected [2, 50]: the",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"][0]},
        ValueError,
        "document_ids has shape [50]; expected [2, 50]: the document",
    ),
    (
        "documents",
        lambda a: {"document_ids": a["document_ids"].to("meta")},
        ValueError,
        "document_ids is on meta and q on ",
    ),
    (
        "documents",
        lambda a: {"document_ids": [0] * 50},
        TypeError,
        "document_ids is a list; expected a dense torch.int32 tensor [2, 50]",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].short()},
        TypeError,
        "cu_seqlens_q is torch.int16; expected torch.int32 or torch.int64 [any]: ",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_kv": a["cu_seqlens_kv"][None]},
        ValueError,
        "cu_seqlens_kv has shape [1, 5]; expected [",
    ),
    (
        "packed",
        lambda a: {"cu_seqlens_kv": [0, 50]},
        TypeError,
        "cu_seqlens_kv is a list; expected a dense torch.int32 tensor [any]: where",
    ),
    (
        "prefix_per_batch",
        lambda a: {"prefix_length": 7},
        TypeError,
        "prefix_length is a int; expected a dense torch.int32 tensor [2]: ",
    ),
    (
        "prefix_per_batch",
        lambda a: {"prefix_length": ints(7)},
        ValueError,
        "prefix_length has shape [1]; expected [2]: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": -1},
        ValueError,
        "prefix_length is -1; expected it to be at least 0: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": True},
        TypeError,
        "prefix_length is a bool; expected an int: number of keys, from",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": 7.0},
        TypeError,
        "prefix_length is a float; expected an int: number of keys, from",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": None},
        TypeError,
        "prefix_length is a NoneType; expected an int: number of keys",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": ints(7)},
        TypeError,
        "prefix_length is a torch.strided tensor; expected an int: ",
    ),
    (
        "prefix_argument",
        lambda a: {"prefix_length": 2**30},
        ValueError,
        "prefix_length is 1073741824; expected it to be between -2**30 and",
    ),
    (
        "sinks",
        lambda a: {"sink": a["sink"].int()},
        TypeError,
        "sink is torch.int32; expected torch.float32 or torch.float16 or torch.bfloat16 [4]: a logit of each head",
    ),
    ("sinks", lambda a: {"sink": a["sink"][:2]}, ValueError, "sink has shape [2]; expected [4]: a logit of each head"),
    (
        "alibi",
        lambda a: {"alibi_slopes": 0.5},
        TypeError,
        "alibi_slopes is a float; expected a dense torch.float32 tensor [4]: by",
    ),
    (
        "alibi",
        lambda a: {"alibi_slopes": a["alibi_slopes"].double()},
        TypeError,
        "alibi_slopes is torch.float64; expected torch.float32 or torch.float16 or torch.bfloat16 [4]: ",
    ),
    (
        "alibi",
        lambda a: {"alibi_slopes": a["alibi_slopes"].to("meta")},
        ValueError,
        "alibi_slopes is on meta and q on ",
    ),
    (
        "temperature",
        lambda a: {"temperature": a["temperature"][:, None]},
        ValueError,
        "temperature has shape [2, 1]; expected [2]: the temperature ",
    ),
    (
        "relative",
        lambda a: {"relative_bias": a["relative_bias"][:, 1:]},
        ValueError,
        "relative_bias has shape [2, 20]; expected [2, 21]: ",
    ),
    (
        "relative",
        lambda a: {"relative_bias": None},
        TypeError,
        "relative_bias is a NoneType; expected a dense torch.float32 tensor [2, 21]",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"].int()},
        TypeError,
        "bias is torch.int32; expected torch.float16 or torch.float32 or torch.bfloat16 [1 or 2",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"][:, :3]},
        ValueError,
        "bias has shape [1, 3, 40, 50]; expected [1 or 2, 1 or 4, 40, 50]: the bias added",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"].expand(3, 4, 40, 50)},
        ValueError,
        "bias has shape [3, 4, 40, 50]; expected [1 or 2, 1 or 4, 40, 50]: ",
    ),
    (
        "dense",
        lambda a: {"bias": a["bias"][:, :, :1]},
        ValueError,
        "bias has shape [1, 4, 1, 50]; expected [1 or 2, 1 or 4, 40, 50]: the bias",
    ),
    ("dense", lambda a: {"bias": a["bias"][0]}, ValueError, "bias has shape [4, 40, 50]; expected ["),
    (
        "written_mask",
        lambda a: {"step": 0},
        ValueError,
        "step is 0; expected it to be at least 1: a parameter of the spec",
    ),
    ("written_mask", lambda a: {"step": False}, TypeError, "step is a bool; expected an int: a parameter of the spec"),
    (
        "written_mask",
        lambda a: {"reach": a["reach"].float()},
        TypeError,
        "reach is torch.float32; expected torch.int32 or torch.int64 [4]: a parameter",
    ),
    (
        "written_rows",
        lambda a: {"first": a["first"][:, 1:]},
        ValueError,
        "first has shape [2, 39]; expected [2, 40]: a parameter",
    ),
    (
        "written_rows",
        lambda a: {"hidden": a["hidden"].int()},
        TypeError,
        "hidden is torch.int32; expected torch.bool [50]: a parameter",
    ),
    (
        "written_number",
        lambda a: {"sharp": True},
        TypeError,
        "sharp is a bool; expected a number: a parameter of the spec",
    ),
    (
        "written_number",
        lambda a: {"sharp": "2"},
        TypeError,
        "sharp is a str; expected a number: a parameter of the spec",
    ),
    (
        "written_number",
        lambda a: {"sharp": float("nan")},
        ValueError,
        "sharp is nan; expected it to be between -2**30 and 2**30",
    ),
    (
        "written_number",
        lambda a: {"sharp": float("inf")},
        ValueError,
        "sharp is inf; expected it to be between -2**30 and 2**30",
    ),
]


@pytest.mark.parametrize(("name", "change", "kind", "sentence"), WRONG, ids=[f"{n}: {s[:36]}" for n, _, _, s in WRONG])
def test_a_wrong_argument_is_one_sentence(
    name: str, change: Callable[[Arguments], Arguments], kind: type[Exception], sentence: str, built: Built, device: str
) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    with pytest.raises(kind) as caught:
        built(name).attention(q, k, v, **{**inputs, **change(inputs)})
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"attention: {sentence}"), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("prefix_argument", "prefix_length"), ("sinks", "sink"), ("dense", "bias"), ("written_mask", "step")],
)
def test_every_argument_is_needed(name: str, missing: str, built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 8, 8), torch.float16, device)
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        built(name).attention(q, k, v, **{key: x for key, x in inputs.items() if key != missing})


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("documents", {"document_ids": torch.int64}),
        ("packed", {"cu_seqlens_q": torch.int64, "cu_seqlens_kv": torch.int64}),
    ],
)
def test_integers_may_have_64_bits(name: str, other: dict[str, torch.dtype], built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    wide = {key: inputs[key].to(dtype) for key, dtype in other.items()}
    assert built(name).attention(q, k, v, **{**inputs, **wide}).equal(built(name).attention(q, k, v, **inputs))


@pytest.mark.share(16)
@pytest.mark.parametrize(
    ("name", "learned", "dtype"), [("sinks", "sink", torch.float16), ("dense", "bias", torch.float32)]
)
def test_learned_inputs_may_have_another_dtype(
    name: str, learned: str, dtype: torch.dtype, built: Built, device: str
) -> None:
    """Such inputs, for example a model's parameters, are converted once, and their gradients have the inputs' dtype."""
    q, k, v, inputs = make_inputs(spec(name), case(name, 40, 50), torch.float16, device)
    given = inputs[learned].detach().to(dtype).requires_grad_()
    same = given.detach().to(inputs[learned].dtype).requires_grad_()
    outs = [built(name).attention(q, k, v, **{**inputs, learned: x}) for x in (given, same)]
    assert outs[0].equal(outs[1])
    found, expected = (torch.autograd.grad(out.float().square().sum(), x)[0] for out, x in zip(outs, (given, same)))
    assert found.dtype == dtype and found.equal(expected.to(dtype))


def test_numbers_may_be_ints_and_zero(built: Built, device: str) -> None:
    q, k, v, inputs = make_inputs(spec("written_number"), case("written_number", 8, 8), torch.float16, device)
    one, same = (built("written_number").attention(q, k, v, **{**inputs, "sharp": x}) for x in (1, 1.0))
    assert one.equal(same)
    assert built("written_number").attention(q, k, v, sharp=0).isfinite().all()
    q, k, v, _ = make_inputs(spec("prefix_argument"), case("prefix_argument", 8, 8), torch.float16, device)
    assert built("prefix_argument").attention(q, k, v, prefix_length=0).isfinite().all()
