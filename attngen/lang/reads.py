"""Names in expressions, and reads of tensor parameters. Each distinct read gets a symbol, named after its tensor."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import sympy

from attngen.errors import shown, suggest
from attngen.ir import Expr, Read, parse, symbol, to_text
from attngen.lang.checks import Part
from attngen.lang.functions import Functions
from attngen.lang.names import CALLS, CONDITIONS, LANGUAGE, MEANT, POSITIONS, SCORE, TAKEN
from attngen.lang.params import SAID, Param


class Reads(Functions):
    """Builds names, and reads of tensors."""

    def __init__(self, params: Mapping[str, Param], score: bool) -> None:
        super().__init__(params, score)
        self.reads: dict[tuple[str, tuple[Expr, ...]], sympy.Symbol] = {}

    def _name(self, node: ast.Name) -> Part:
        name = node.id
        if name in self.parts:
            self.used.add(name)
            return self.parts[name]
        if name in self.indices:
            return Part("int", sympy.Integer(self.indices[name]), True)
        if name in self.params:
            self.used.add(name)
            param = self.params[name]
            if param.tensor is not None:
                raise self.error(
                    node, f"uses the tensor `{name}` without an index; write {name}[{', '.join(self._indices(param))}]"
                )
            if param.value is None:
                return Part(param.kind, symbol(name))
            make = {"bool": lambda v: sympy.true if v else sympy.false, "int": sympy.Integer, "real": sympy.Float}[
                param.kind
            ]
            return Part(param.kind, make(param.value), True)
        if name in POSITIONS:
            return Part("int", parse(POSITIONS[name]))
        if name in CONDITIONS:
            return Part("bool", sympy.true if CONDITIONS[name] else sympy.false, True)
        if name == SCORE and self.score:
            return Part("real", symbol(SCORE))
        if name == SCORE:
            raise self.error(node, "uses the score `s`, which masks do not have")
        if name in CALLS:
            raise self.error(node, f"uses the function `{name}` without arguments; it takes {CALLS[name][0]}")
        known = {*POSITIONS, *CONDITIONS, *self.params, *self.parts, *((SCORE,) if self.score else ())}
        meant = MEANT.get(name)
        hint = f"did you mean `{meant}`?" if meant in known else suggest(name, known)
        raise self.error(
            node, f"uses `{shown(name)}`, which is no name of the language and not declared in `params`; {hint}"
        )

    def _indices(self, param: Param) -> list[str]:
        """An index as the user likely means it, for a hint."""
        letters = {"B": "b", "Hq": "h", "Hkv": "hkv", "Nq": "q_idx", "Nk": "kv_idx"}
        parts = [d.partition("/") for d in param.dims]
        return [letters[d] + (f" // {by}" if by else "") if d in letters else "q_idx - kv_idx" for d, _, by in parts]

    def _read(self, node: ast.Subscript) -> Part:
        param = self.params.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if param is None or param.tensor is None or not isinstance(node.value, ast.Name):
            if not isinstance(node.value, ast.Name):
                raise self.error(node, f"indexes `{self.written(node.value)}`, which is not a tensor parameter")
            if node.value.id not in LANGUAGE and param is None:
                self._name(node.value)
            raise self.error(node, f"indexes `{node.value.id}`, which is not a tensor parameter")
        tensor = node.value.id
        self.used.add(tensor)
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(indices) != len(param.dims):
            example = f"{tensor}[{', '.join(self._indices(param))}]"
            raise self.error(
                node,
                f"indexes `{tensor}` by {len(indices)}, but it has {len(param.dims)} dimensions; "
                f"expected as in {example}",
            )
        parts = [self.build(n) for n in indices]
        for n, part in zip(indices, parts):
            if symbol(SCORE) in part.expr.free_symbols:
                raise self.error(
                    n,
                    f"the index `{self.written(n)}` of `{tensor}` depends on the score; "
                    "expected positions and parameters",
                )
            if part.kind != "int":
                raise self.error(
                    n, f"the index `{self.written(n)}` of `{tensor}` is {SAID[part.kind]}; expected an integer"
                )
        key = tensor, tuple(p.expr for p in parts)
        if key not in self.reads:
            count = sum(t == tensor for t, _ in self.reads)
            # a name with a space cannot be declared; `finish` replaces it by the final one
            self.reads[key] = symbol(tensor) if not count else symbol(f"{tensor} {count}")
        return Part(param.kind, self.reads[key])

    def finish(self, expr: Any) -> tuple[Any, tuple[Read, ...]]:
        """The expression and its reads under their final names."""
        taken = {*self.params, *LANGUAGE, *TAKEN}
        names: dict[sympy.Symbol, sympy.Symbol] = {}
        for tensor in {t: None for t, _ in self.reads}:
            of_tensor = [(index, at) for (t, index), at in self.reads.items() if t == tensor]
            if len(of_tensor) == 1:
                continue
            number = 0
            for index, at in of_tensor:
                name = _suffixed(tensor, index)
                while name is None or name in taken or symbol(name).is_integer:
                    number += 1
                    name = f"{tensor}_{number}"
                taken.add(name)
                names[at] = symbol(name)
        reads = ((t, index, at) for (t, index), at in self.reads.items())
        final = tuple(
            Read(names.get(at, at).name, t, tuple(_settled(i.xreplace(names)) for i in index)) for t, index, at in reads
        )
        return _settled(expr.xreplace(names)), final


def _suffixed(tensor: str, index: tuple[Expr, ...]) -> str | None:
    """A name such as `doc_q` for doc[b, q_idx], made from the positions among the indices; None if there is no position
    or an index is not a position, b, h or hkv."""
    short = {symbol("q_idx"): "q", symbol("kv_idx"): "kv"}
    plain = {symbol(n) for n in ("b", "h", "hkv")}
    letters = [short[i] for i in index if i in short]
    return "_".join([tensor, *letters]) if letters and all(i in short or i in plain for i in index) else None


def _settled(expr: Any) -> Any:
    """The expression as it reads back from the IR's text.

    Sympy simplifies some parts, such as min(x, max(1, 2)), only on a second pass.
    """
    for _ in range(4):
        again = parse(to_text(expr))
        if again == expr:
            return expr
        expr = again
    return expr
