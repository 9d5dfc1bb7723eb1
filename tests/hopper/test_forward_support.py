"""Which specs have a warp-specialized forward, which tiles they may give, and the errors where there is none."""

from __future__ import annotations

import pytest

from attngen.errors import BuildError
from attngen.ir import Config
from attngen.ir.parser import parse_module
from attngen.ir.printer import print_module
from attngen.lowering.pipeline import lower
from attngen.spec import make_spec
from attngen.targets.hopper.configs.common import FEW_ROWS
from attngen.targets.hopper.configs.forward import config as chosen_config
from attngen.targets.hopper.passes.warp_specialize import WarpSpecialize
from tests.helpers import spec, target
from tests.hopper.common import WARP_SPECIALIZED, after_passes, hopper_spec, lowered

# A row vector of queries in a mask, and a mask with many operations per score.
LIMIT = {"expr": "kv_idx <= limit[b, q_idx]", "params": {"limit": {"tensor": ["B", "Nq"], "dtype": "int32"}}}
PARITY = {"expr": "(q_idx*7 + kv_idx*3) % 5 != 0 and (q_idx//3 + kv_idx//7) % 3 != 1"}


@pytest.mark.parametrize(
    "name, reason",
    [
        ("causal_fa1", "its programs own no tile of queries (`order: kv_outer`)"),
        ("causal_fp32", "no dtype of the spec has 16 bits"),
    ],
)
def test_a_spec_that_cannot_be_warp_specialized_gets_one_sentence(name: str, reason: str) -> None:
    assert name not in WARP_SPECIALIZED
    with pytest.raises(BuildError, match="is hopper, and the kernel @fwd cannot be warp-specialized: ") as error:
        lower(hopper_spec(name))
    assert str(error.value).endswith(reason)


@pytest.mark.share(16)
def test_loop_bounds_from_row_vectors_of_queries_need_block_lists_from_data() -> None:
    """Otherwise a warp group would need a row vector before it starts. Lists from data contain only visible blocks, so
    their ends need no row vector."""
    assert chosen_backends(mask=LIMIT) == chosen_backends(mask={"all_of": ["causal", LIMIT]}) == ["hopper"]
    listed = {"all_of": [{"block_sparse": {"block": 128}}, LIMIT]}
    assert chosen_backends(mask=listed) == []
    with pytest.raises(BuildError, match="the bounds of its loops are computed from a number for each query of a tile"):
        chosen_backends(mask=listed, schedule={"backend": "hopper"})


def test_specs_may_give_the_tiles() -> None:
    data = {
        "name": "tiles",
        "head_dim": 64,
        "mask": "causal",
        "schedule": {"backend": "hopper", "block_q": 64, "block_kv": 64, "stages": 4},
    }
    config = lower(make_spec(data)).configs("fwd", "hopper")[0]
    assert (config.block_q, config.block_kv, config.num_stages) == (
        64,
        64,
        4,
    )  # this many stages leave no named barrier for a persistent program
    with pytest.raises(BuildError, match="is 32; expected 64 or 128 or 192 on the backend hopper"):
        lower(make_spec({**data, "schedule": {"backend": "hopper", "block_q": 32}}))
    with pytest.raises(BuildError, match="is 256; expected 64 or 128 or 192 on the backend hopper"):
        WarpSpecialize(lambda specialization, module: (chosen_config(module, block_q=256),)).run(
            after_passes("causal_gqa")["dce"]
        )


def test_the_backend_changes_the_hash_only_where_a_spec_gives_it() -> None:
    assert "backend" not in spec("causal_gqa").canonical()["schedule"]
    assert hopper_spec("causal_gqa").hash() != spec("causal_gqa").hash()


def chosen_backends(**data: object) -> list[str]:
    """The backends other than Triton for which a forward has configs, if the spec leaves the choice to attngen."""
    module = lower(make_spec({"name": "auto", "head_dim": 128, "mask": "causal", **data}))
    return [
        config.backend
        for config in dict(module.schedules)["fwd"]
        if isinstance(config, Config) and config.backend != module.backend
    ]


@pytest.mark.share(16)
def test_kernels_are_warp_specialized_by_default_where_they_are_faster() -> None:
    assert chosen_backends() == ["hopper"] and chosen_backends(head_dim=256, mask="none") == ["hopper"]
    assert all(
        chosen_backends(head_dim=head_dim, mask=mask) == ["hopper"]
        for head_dim in (16, 32, 40, 64)
        for mask in ("none", "causal")
    )
    looked_up = {"head_dim": 64, "score": {"relative_bias": {"max_distance": 128}}}
    assert chosen_backends(**looked_up) == chosen_backends(**{**looked_up, "head_dim": 48}) == ["hopper"]
    for other in (
        {"mask": "key_padding"},
        {"mask": {"all_of": ["causal", "document"]}},
        {"score": "dense_bias"},
        {"dropout": True},
    ):
        assert chosen_backends(**{**looked_up, **other}) == []  # registers would spill, or the kernel is slower
    drops = {
        "head_dim": 96,
        "heads": {"sharing": "mqa"},
        "mask": "none",
        "dropout": True,
    }  # not measured
    assert (
        chosen_backends(**drops)
        == chosen_backends(**{**drops, "mask": {"key_padding": {"lengths": True}}, "score": {"softcap": 30.0}})
        == ["hopper"]
    )
    for other in ({"mask": "causal"}, {"head_dim": 64}, {"head_dim": 256}, {"score": "alibi"}, {"mask": "key_padding"}):
        assert chosen_backends(**{**drops, **other}) == []  # not known to be faster, or registers would spill
    assert (
        chosen_backends(mask={"all_of": [LIMIT, "key_padding"]}) == chosen_backends(**{**drops, "mask": PARITY}) == []
    )  # registers would spill
    assert (
        chosen_backends(mask=LIMIT, score={"relative_bias": {"max_distance": 9}})
        == chosen_backends(mask=LIMIT, score="alibi", head_dim=256)
        == []
    )
    assert chosen_backends(mask={"all_of": [LIMIT, "key_padding"]}, head_dim=64) == ["hopper"]
    assert chosen_backends(dtype="fp32", fp32_precision="tf32") == chosen_backends(schedule={"backend": "triton"}) == []
    assert (
        chosen_backends(schedule={"block_q": 64}) == chosen_backends(schedule={"order": "kv_outer"}) == []
    )  # tiles are those of the portable kernel
    parts = (
        "floor(sqrt(abs(q_idx - kv_idx))) % 3 == 0",
        "int(log(1.0 + kv_idx) * 2.5) != round(0.25 * (q_idx + h))",
        "kv_idx <= q_idx",
    )
    heavy = {"expr": " and ".join(parts)}
    assert chosen_backends(mask=heavy) == [] and chosen_backends(mask=heavy, schedule={"backend": "hopper"}) == [
        "hopper"
    ]
    capped, activated = ({"mask": "none", "score": [{"expr": e}]} for e in ("9 * tanh(s / 9)", "log(relu(s) + 1)"))
    assert (
        chosen_backends(**capped) == ["hopper"] and chosen_backends(**activated) == []
    )  # a logarithm counts the operations of its library function
    (config,) = target("causal_gqa").configs("fwd", "hopper")
    assert config.min_rows == FEW_ROWS and lowered("causal_gqa").configs("fwd", "hopper")[0].min_rows == 0
    text = print_module(target("causal_gqa"))
    assert "  sm90 bytes=2 rows>64 : BLOCK_Q=128 BLOCK_KV=128 num_warps=4 num_stages=2 TMA=1 backend=hopper\n" in text
    assert print_module(parse_module(text)) == text
