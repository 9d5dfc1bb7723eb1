"""The mistakes that tests/mutations.py makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    what: what is wrong afterwards.
    file, old, new: the edit; `old` occurs once in the file.
    tests: where it is expected to be caught, as arguments of pytest; a part after `-k` selects tests.
    specs: the modules that these tests use, by name.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str
    specs: tuple[str, ...] = ()


MUTATIONS = (
    # masks and score modifiers
    Mutation(
        "a window's bound is off by one",
        "attngen/masks/sliding_window.py",
        "position - KV <= self.left\n",
        "position - KV < self.left\n",
        "tests/test_numerics.py tests/test_masks.py -k window",
        ("window_gqa",),
    ),
    Mutation(
        "the causal comparison is strict",
        "attngen/masks/causal.py",
        "Q + position_offset(self.align) >= KV",
        "Q + position_offset(self.align) > KV",
        "tests/test_numerics.py -k causal_mqa",
        ("causal_mqa",),
    ),
    Mutation(
        "ALiBi's slope has the wrong sign",
        "attngen/scores/alibi.py",
        'return S - symbol("alibi_slopes") * sympy.Abs(',
        'return S + symbol("alibi_slopes") * sympy.Abs(',
        "tests/test_numerics.py tests/test_masks.py -k alibi",
        ("alibi_mha",),
    ),
    Mutation(
        "a key before its document's first is visible",
        "attngen/masks/document.py",
        "return sympy.And(first <= KV, end > KV)",
        "return sympy.And(first <= KV + 1, end > KV)",
        "tests/test_documents.py tests/test_numerics.py tests/test_masks.py -k packed",
        ("packed_document_gqa",),
    ),
    # language and specs
    Mutation(
        "`<` is read as `<=`",
        "attngen/lang/convert.py",
        "ast.Lt: sympy.Lt,",
        "ast.Lt: sympy.Le,",
        "tests/test_lang.py",
    ),
    Mutation(
        "a head_dim of any width is accepted",
        "attngen/spec/rules.py",
        "if n > WIDEST_HEAD), 0)",
        "if n > 2 * WIDEST_HEAD), 0)",
        "tests/test_spec.py tests/test_wide_heads.py -k 520",
    ),
    # builders
    Mutation(
        "the sum of weights counts each tile twice",
        "attngen/builders/forward.py",
        'b.reduce_sum("p_sum", "soft.p", "BLOCK_KV", "step")  # after',
        (
            'b.reduce_sum("p_sum", b.map("p_twice", 2 * symbol("p"), "step", "f32", False, p="soft.p"), "BLOCK_KV", '
            '"step")  # after'
        ),
        "tests/test_numerics.py -k causal_mqa",
        ("causal_mqa",),
    ),
    Mutation(
        "dS has delta with the wrong sign",
        "attngen/builders/backward.py",
        'b.map(name, p * (dp - delta), "step"',
        'b.map(name, p * (dp + delta), "step"',
        "tests/test_numerics.py -k causal_mqa",
        ("causal_mqa",),
    ),
    Mutation(
        "the tangent of the scores leaves out that of K",
        "attngen/builders/jvp.py",
        'b.dot("ts", "q", "tk", "D_QK", "step", acc="ts_part")',
        'b.dot("ts", "q", "k", "D_QK", "step", acc="ts_part")',
        "tests/codegen/test_emit.py tests/test_jvp.py -k causal_mqa",  # the verifier refuses to build it
        ("causal_mqa", "causal_fp32"),
    ),
    Mutation(
        "with dropout, dS of a dropped score leaves out -P * delta",
        "attngen/builders/backward.py",
        "b.map(name, p_kept * dp - p * delta,",
        "b.map(name, p_kept * dp - p_kept * delta,",
        "tests/test_dropout.py tests/test_numerics.py -k causal_dropout_mqa",
        ("causal_dropout_mqa",),
    ),
    Mutation(
        "splits of the keys are merged without their weights",
        "attngen/builders/serving.py",
        'symbol("o_partial") * symbol("weights")',
        'symbol("o_partial") + 0 * symbol("weights")',
        "tests/serving/test_cache.py tests/serving/test_combine.py",
        ("decode_gqa",),
    ),
    # tiles
    Mutation(
        "the last partial tile is left out",
        "attngen/tiles/ranges.py",
        "last = cdiv(sympy.Max(0, sympy.Min(*highs)), block)",
        "last = floordiv(sympy.Max(0, sympy.Min(*highs)), block)",
        "tests/transforms/test_classify_tiles.py tests/transforms/test_tiles_bruteforce.py",
    ),
    Mutation(
        "a partial tile counts as full",
        "attngen/tiles/ranges.py",
        "_if_all(full_if, floordiv(sympy.Max(0, sympy.Min(*full_highs)), block))",
        "_if_all(full_if, cdiv(sympy.Max(0, sympy.Min(*full_highs)), block))",
        "tests/transforms/test_classify_tiles.py tests/transforms/test_tiles_bruteforce.py",
    ),
    # transforms
    Mutation(
        "tanh is rewritten with the wrong sign",
        "attngen/transforms/exp2_softmax.py",
        "return 1 - 2 / (1 + exp2(2 * LOG2E * args[0]))",
        "return 2 / (1 + exp2(2 * LOG2E * args[0])) - 1",
        "tests/transforms/test_exp2_softmax.py",
    ),
    Mutation(
        "no barrier stands before a loop that rewrites sums",
        "attngen/transforms/insert_cta_barriers.py",
        "if isinstance(op, tile.Loop) and op.body in rewriting else [op]",
        "if False else [op]",
        "tests/transforms/test_insert_cta_barriers.py",
    ),
    Mutation(
        "the kernel that merges splits does not wait for the one that computes them",
        "attngen/transforms/dependent_launch.py",
        '            if isinstance(op, tile.Loop) and block == "entry"\n',
        "            if False\n",
        "tests/transforms/test_dependent_launch.py",
        ("decode_gqa",),
    ),
    Mutation(
        "dead code elimination drops barriers",
        "attngen/transforms/dce.py",
        "isinstance(op, (tile.Barrier, tile.Scatter, tile.Store, tile.GridDependencyWait))",
        "isinstance(op, (tile.Scatter, tile.Store, tile.GridDependencyWait))",
        "tests/transforms/test_dce.py tests/transforms/test_insert_cta_barriers.py tests/ir/test_verify.py",
    ),
    # positions
    Mutation(
        "the rank of a chunk counts the chunk itself",
        "attngen/lang/chunks.py",
        "torch.searchsorted(starts[-1], rows)",
        "torch.searchsorted(starts[-1], rows, right=True)",
        "tests/test_chunks.py tests/test_chunks_interpreted.py -k causal",
    ),
    Mutation(
        "ranks of chunks end before the end of the sequence",
        "attngen/lang/chunks.py",
        "count = -(-length // chunk) * (chunk // unit) + 1",
        "count = -(-length // chunk) * (chunk // unit)",
        "tests/test_chunks.py -k causal",
    ),
    Mutation(
        "masks are evaluated at rows of the call",
        "templates/triton/kernels.py.jinja",
        "return _aligned(start, BLOCK)",
        "return _aligned(row, BLOCK)",
        "tests/test_chunks_interpreted.py -k causal",
    ),
    Mutation(
        "no position comes with a full tile that @first masks",
        "attngen/ir/pipe_control.py",
        "loops = (op for op in ops if isinstance(op, PipelinedLoop) and op.first and op.full)",
        "loops: tuple[PipelinedLoop, ...] = ()",
        "tests/test_chunks.py -k push",
    ),
    Mutation(
        "the order of accumulation counts tiles that the call does not have",
        "attngen/tiles/order.py",
        'tiles, *of_call = position_of(f"{own}_visits", own, tiles)',
        "of_call = []",
        "tests/ir/test_positions.py tests/test_chunks.py -k causal",
    ),
    Mutation(
        "a semaphore has the tile's row in the whole sequence",
        "attngen/builders/common.py",
        "tuple(self.row(i) if i == self.loop_axis else i for i in index[:-1])",
        'tuple(f"{i}_start" if i == self.loop_axis else i for i in index[:-1])',
        "tests/test_chunks.py -k causal",  # the verifier refuses to build it
    ),
    # schedules
    Mutation(
        "a config is chosen that does not fit in shared memory",
        "attngen/targets/triton/fit.py",
        "if need <= device.smem_per_block:",
        "if need <= 2 * device.smem_per_block:",
        "tests/transforms/test_select_tiles.py tests/cost",
    ),
    Mutation(
        "a tile may be larger than the mask's blocks",
        "attngen/schedule/table.py",
        "max(config.block_q, config.block_kv) <= module.blocks.size",
        "max(config.block_q, config.block_kv) >= module.blocks.size",
        "tests/tune/test_table.py tests/transforms/test_select_tiles.py",
    ),
    # Hopper
    Mutation(
        "a tile is released before the last product that reads it",
        "attngen/targets/hopper/passes/insert_pipelines.py",
        "        while reader in added:\n            reader = added[reader]\n",
        "",
        "tests/hopper -k insert_pipelines",
    ),
    Mutation(
        "the scheduler barrier is not passed on",
        "attngen/targets/hopper/passes/ping_pong.py",
        "            if op is group[-1]\n",
        "            if op is group[-1] and n\n",
        "tests/hopper -k ping_pong",
    ),
    Mutation(
        "a warp group that stores tiles starts in the wrong phase",
        "attngen/targets/hopper/lowering/counters.py",
        "stage, phase, int(writes))",
        "stage, phase, int(not writes))",
        "tests/hopper/test_generated.py tests/hopper/test_fused_backward_printing.py tests/hopper/test_mla_decode.py",
        ("causal_gqa", "decode_mla"),
    ),
    Mutation(
        "a pipeline whose stages mbarriers free has named barriers, too",
        "attngen/targets/hopper/configs/barriers.py",
        "return int(is_reused(kernel, pipeline) and not release_arrivals(kernel, pipeline))",
        "return int(is_reused(kernel, pipeline))",
        "tests/hopper/test_fused_backward_printing.py tests/hopper/test_jvp_kernel.py -k distinct",
    ),
    Mutation(
        "machine code may overwrite a register of a product in flight",
        "attngen/targets/hopper/toolchain/reuse.py",
        "        flight = _after(code[at], flight)\n",
        "        flight = _after(code[at], flight)[-1:]\n",
        "tests/hopper/test_reuse.py",
    ),
    # Triton
    Mutation(
        "the closed form of shared memory leaves out the tiles that stay",
        "attngen/targets/triton/sram.py",
        "stationary += [pair_bytes(op) for op in pairs if not in_loop(kernel, op)]",
        "stationary = []",
        "tests/cost/test_compiled.py",
    ),
    # what the targets share, and templates
    Mutation(
        "an address has the stride of another dimension",
        "attngen/targets/printing/memory_views.py",
        "(i, stride) for i, stride in zip(access.index, stride_names(tensor.name, tensor.type.dims)) if i != 0",
        "(i, stride) for i, stride in zip(access.index, stride_names(tensor.name, tensor.type.dims)[::-1]) if i != 0",
        "tests/test_numerics.py -k causal_mqa",
        ("causal_mqa",),
    ),
    Mutation(
        "an instruction that loads 128 bits writes two registers",
        "attngen/targets/common/instructions.py",
        'return 4 if "128" in more else 2 if',
        'return 2 if "128" in more else 2 if',
        "tests/hopper/test_unset.py tests/hopper/test_reuse.py tests/hopper/test_sass.py",
    ),
    Mutation(
        "dropout keeps the scores that it should drop",
        "templates/triton/dropout.py.jinja",
        "return chosen >= (threshold",
        "return chosen < (threshold",
        "tests/test_dropout.py tests/test_numerics.py -k causal_dropout_mqa",
        ("causal_dropout_mqa",),
    ),
    # verifier and executor
    Mutation(
        "the verifier accepts an index past the end",
        "attngen/verify/indexing.py",
        "if not (prove_le(high, extent - 1) or prove_le(index, extent - 1) or checked(index < extent)):",
        "if not (prove_le(high, extent) or prove_le(index, extent) or checked(index < extent)):",
        "tests/test_documents.py tests/ir/test_verify.py",
    ),
    Mutation(
        "the executor adds nothing to the accumulator of a product",
        "attngen/interp/arithmetic.py",
        "found = found if op.acc is None else found + values[op.acc]",
        "found = found if op.acc is None else found",
        "tests/ir/test_execute.py tests/transforms/test_equality.py",
    ),
    # runtime and generated functions
    Mutation(
        "results have the strides of another order of dimensions",
        "attngen/runtime/memory.py",
        "order = sorted(range(3), key=steps.__getitem__, reverse=True)",
        "order = sorted(range(3), key=steps.__getitem__)",
        "tests/test_buffers.py -k results_lie",
        ("padding_mha",),
    ),
    Mutation(
        "a buffer for 32 bits has the element type",
        "attngen/codegen/host.py",
        "{', '.join(self._dense(dims))}, {dtype})",
        "{', '.join(self._dense(dims))}, q.dtype)",
        "tests/test_numerics.py -k causal_mqa",
        ("causal_mqa",),
    ),
    # around the compiler
    Mutation(
        "a spec is compiled again for each form in which it is given",
        "attngen/api.py",
        'own = store.key_of(b"spec" + spec.hash().encode())',
        "own = key",
        "tests/test_api.py",
    ),
    Mutation(
        "the cache's key leaves out attngen's own files",
        "attngen/cache/store.py",
        "hashlib.sha256(digest().encode() + request)",
        "hashlib.sha256(request)",
        "tests/test_module_cache_processes.py",
    ),
    Mutation(
        "FlexAttention's `>=` is traced as `>`",
        "attngen/frontends/elementwise.py",
        '"ge": (ast.GtE, operator.ge),',
        '"ge": (ast.Gt, operator.ge),',
        "tests/test_flex_specs.py tests/test_flex.py",
    ),
    Mutation(
        "a product has half of its FLOPs",
        "attngen/cost/flops.py",
        "return 2 * sympy.Mul(",
        "return sympy.Mul(",
        "tests/cost/test_analysis.py",
    ),
    Mutation(
        "a proof of `a - 1 <= b` counts as one of `a <= b`",
        "attngen/ir/prove.py",
        "    return _proof(a, b)[0]\n",
        "    return _proof(a - 1, b)[0]\n",
        "tests/ir/test_prove.py",
    ),
    Mutation(
        "no pass removes dead code",
        "attngen/lowering/pipeline.py",
        "        Dce(),\n",
        "",
        "tests/ir tests/transforms -k dce",
    ),
    Mutation(
        "the harness compares errors with ten times the bar",
        "attngen/conformance/result.py",
        "BAR = 2.0",
        "BAR = 20.0",
        "tests/test_sweep.py tests/test_numerics.py",
    ),
    Mutation(
        "tuning chooses the slowest schedule",
        "attngen/tune/tuner.py",
        "        fastest = min(ran, key=lambda t: (not t.rounds, t.median))\n",
        "        fastest = max(ran, key=lambda t: (not t.rounds, t.median))\n",
        "tests/tune/test_tuner.py",
    ),
    Mutation(
        "the map of tiles shows tiles with hidden elements as full",
        "attngen/report/tilemap.py",
        '"full" if count == blocks.size**2 else "partial"',
        '"full" if count else "partial"',
        "tests/test_page.py tests/transforms/test_sampled.py",
    ),
    Mutation(
        "speedups have the arithmetic mean of logarithms",
        "attngen/bench/results.py",
        "mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))",
        "mean = sum(math.log(ratio) for ratio, _ in found) / len(found)",
        "tests/bench/test_results.py",
    ),
    Mutation(
        "`attngen build --check` accepts a folder that differs",
        "attngen/cli/build.py",
        "    if any(diffs):\n",
        "    if all(diffs):\n",
        "tests/test_cli.py -k check",
    ),
    Mutation(
        "a window of transformers has one key more",
        "attngen/integrations/transformers/formula.py",
        "for left, right in ((number - 1, 0), (number, number)):\n            if conditions ==",
        (
            "for left, right in ((number - 1, 0), (number, number)):\n            left += right == 0\n"
            "            if conditions =="
        ),
        "tests/test_transformers_formulas.py tests/test_transformers.py",
    ),
    Mutation(
        "a kernel that spills gets its certificate",
        "attngen/certify/certificate.py",
        'if report.spilled_bytes and CLASSES[config.device].backend == "cuda":',
        'if report.spilled_bytes > 64 and CLASSES[config.device].backend == "cuda":',
        "tests/cost/test_compiled.py",
    ),
)
