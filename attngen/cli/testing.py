"""The command `test`: a spec's module beside naive attention."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import typer

from attngen.cli.common import SpecPath, lower
from attngen.cli.console import count, err
from attngen.errors import AttngenError


def test(
    spec: SpecPath,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="seed of the random inputs")] = 0,
) -> None:
    """Test a spec's module against naive attention.

    It runs on CUDA if there is a device, else in Triton's interpreter, on small cases. Errors of the results and of every gradient are
    relative, against fp64. A case passes if none is above twice what naive attention has in the same dtype.

    \b
    attngen test specs/causal_mqa.yaml
    attngen test specs/causal_mqa.yaml --seed 7
    """
    from attngen.emit.files import write_module
    from attngen.emit.render import render
    from attngen.spec import load_spec

    loaded = load_spec(spec)
    module = lower(spec, loaded)
    failed = 0
    with err.status("importing torch") as status, tempfile.TemporaryDirectory() as folder:
        import torch

        cuda = torch.cuda.is_available()
        if not cuda:
            os.environ["TRITON_INTERPRET"] = "1"
            warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # log2(0) of rows that see nothing
        from attngen.testing import check_interpreter, cli_cases, load_module, result_names, run_case

        check_interpreter()
        write_module(render(module), Path(folder) / loaded.name)
        generated = load_module(Path(folder) / loaded.name)
        print(f"{loaded.name} on {torch.cuda.get_device_name() if cuda else 'the CPU, in the interpreter of Triton'}")
        widths = {name: max(8, len(name)) + 1 for name in result_names(loaded)}
        print(f"{'case':<28}{'dtype':<7}{''.join(f'{name:<{width}}' for name, width in widths.items())}worst, over naive")
        for case, dtype in cli_cases(loaded, cuda):
            status.update(f"{case} {dtype}")
            result = run_case(generated, loaded, case, dtype, "cuda" if cuda else "cpu", seed)
            failed += not result.ok
            errors = "".join(f"{result.ours[name]:<{width}.1e}" for name, width in widths.items())
            ratio = f"{result.worst} {result.ratio(result.worst):.2f}x"
            print(f"{case!s:<28}{dtype:<7}{errors}{ratio:<14} {'ok' if result.ok else 'FAILED'}", flush=True)
    if failed:
        raise AttngenError(f"{count(failed, 'case')} of {loaded.name} further from the truth than twice naive attention's error")
