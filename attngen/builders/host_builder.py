"""Build host programs: collect the ops of one program, and declare the arguments that several programs share."""

from __future__ import annotations

from typing import Any

import sympy

from attngen.ir import Block, Host, Module, Op, Type, Uses, launch, tile
from attngen.ir.names import DROPOUT_SCALARS, SHAPES, block_lists, tensor_dtype


class HostBuilder:
    """Collects the ops of one host program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[str, list[Op]] = {"entry": []}

    def add(self, op: Op, block: str = "entry") -> str:
        self.blocks.setdefault(block, []).append(op)
        return op.name

    def tensor(self, name: str) -> str:
        """Declare an argument whose type is the same in every module."""
        return self.add(tile.Arg(name, "in", known_type(name)))

    def type_of(self, name: str) -> Type:
        """The type of a value of the program."""
        return next(op.results()[""] for ops in self.blocks.values() for op in ops if op.name == name)

    def alloc(self, name: str, block: str = "entry", type_: Type | None = None, **options: Any) -> str:
        return self.add(launch.Alloc(name, type_ or known_type(name), **options), block)

    def launch(self, kernel: str, block: str, args: Uses = (), **sizes: Any) -> None:
        given = tuple((size, sympy.sympify(value)) for size, value in sizes.items())
        self.add(launch.Launch(f"_launch_{self._count()}", kernel, args, given), block)

    def branch(self, name: str, then: str, block: str = "entry", **options: Any) -> None:
        self.add(launch.If(name, then, **options), block)

    def give(self, block: str = "entry", **values: str) -> None:
        self.add(tile.Yield(f"_yield_{self._count()}", tuple(values.items())), block)

    def _count(self) -> int:
        return sum(map(len, self.blocks.values()))

    def host(self) -> Host:
        return Host(self.name, tuple(Block(name, tuple(ops)) for name, ops in self.blocks.items()))


def known_type(name: str) -> Type:
    """The type of a tensor that has the same type in every module."""
    return Type(tensor_dtype(name), SHAPES[name], "hbm")


def split_columns(b: HostBuilder, block: str, source: str, argument: str, named: str = "") -> Uses:
    """Views of a tensor's latent and rotated parts of head_dim, as kernel arguments named after `argument`.

    named: the start of the views' names, if they are not named after the argument.
    """
    name, seen = named or argument, b.type_of(source)
    views = {"latent": ("first_columns", "D_V", ""), "rope": ("last_columns", "D_ROPE", "_ROPE")}
    stem, new = argument.removesuffix("_NEW"), "_NEW" * argument.endswith("_NEW")
    given = []
    for part, (by, width, suffix) in views.items():
        ref = b.add(launch.View(f"{name}_{part}", source, by, Type(seen.dtype, (*seen.dims[:-1], width), "hbm")), block)
        given.append((f"{stem}{suffix}{new}", ref))
    return tuple(given)


def operands(b: HostBuilder, module: Module, direction: str) -> None:
    """Declare the arguments after q, k and v: inputs of mask, modifiers and dropout, block lists and scalars.

    Lists that are the same for all sequences or heads are expanded. With a cache, in the direction `decode`, a
    dimension of keys has room for all keys that a sequence may have. In the direction `key_mass` only the inputs of
    that kernel are declared, which has no dropout.
    """
    only_key_mass = direction == "key_mass"
    kernels = [module.kernel(direction)] if only_key_mass else module.kernels
    read = {a.name.lower() for kernel in kernels for a in kernel.args}
    given = {i.name: (i.dtype, i.shape) for i in module.inputs if i.shape and i.name in read}
    derived = [d for d in module.derived if not (d.program and direction == "decode")]  # programs are part of @decode
    given |= {
        name: (d.dtype, shape)
        for d in derived
        for name, shape in zip(d.names, d.shapes)
        if not only_key_mass or name in read
    }
    for name, (dtype, dims) in given.items():
        shape = tuple("Nc" if d == "Nk" and direction == "decode" else d for d in dims)
        b.add(tile.Arg(name.upper(), "in", Type(dtype, shape, "hbm")))
    lists = {axis: block_lists(axis, module.blocks.data) if module.blocks else {} for axis in ("q", "kv")}
    listed_axes = {"forward": ("q",), "jvp": ("q",), "key_mass": ("kv",)}.get(direction, ("q", "kv"))
    for axis in listed_axes if only_key_mass else lists:
        for name, dims in lists[axis].items():
            b.add(tile.Arg(name.lower(), "in", Type("i32", ("*", "*", *dims[2:]), "hbm")))
    drops = module.dropout and not only_key_mass
    if drops:
        b.add(tile.Arg("SEED", "in", Type("i64", (), "hbm")))
    numbers = {i.name: i.dtype for i in module.inputs if not i.shape and (not only_key_mass or i.name in read)} | (
        DROPOUT_SCALARS if drops else {}
    )
    for name, dtype in (numbers | {"scale": "f32"}).items():
        b.add(tile.Arg(name, "scalar", Type(dtype, (), "reg")))
    for axis in listed_axes:
        for name, dims in lists[axis].items():
            b.add(launch.View(name, name.lower(), "expand", Type("i32", dims, "hbm")))
