"""Read the small languages inside an HLO instruction: shapes with layouts, and replica groups.

`read_shape` turns `(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[])` into arrays with dims, element bits and
memory space; `bytes_of` counts them. `read_groups` turns a `replica_groups=` value, written as lists, as
an iota or over a named mesh, into a group size, axis names and members. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

# Bits of an element in memory. XLA keeps sub-byte integers in whole bytes unless the layout says E(bits).
_BITS = {
    **{"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128},
    **dict.fromkeys(("s1", "u1", "s2", "u2", "s4", "u4", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64"), 64),
}
_EIGHT_BIT_FLOAT = re.compile(r"f(8|4|6)e\d+m\d+[a-z0-9]*$")


class Array(NamedTuple):
    """An array shape."""

    dtype: str
    dims: tuple[int, ...]
    bits: int | None  # per element; None for a type this reader does not know
    space: int  # memory space: 0 HBM, 1 VMEM, 2 sync flags, 5 host (XLA docs, shapes and layout)


Shape = Array | tuple  # a tuple shape is a plain tuple of shapes

_SPACE = re.compile(r"S\((\d{1,9})\)")
_ELEMENT_BITS = re.compile(r"E\((\d{1,9})\)")


@lru_cache(maxsize=4096)
def read_shape(text: str) -> Shape:
    """Return a shape: an Array, or a tuple of shapes. Layouts, tiles and comments are accepted.

    `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` is Array("bf16", (8, 128), 16, 1).
    """
    stack: list[list[Shape]] = [[]]
    for match in _SHAPE_TOKEN.finditer(text):
        if match["dtype"]:
            stack[-1].append(_array(match))
        elif match[0] == "(" and len(stack) < _MAX_NESTED:
            stack.append([])
        elif match[0] == ")" and len(stack) > 1:
            closed = tuple(stack.pop())
            stack[-1].append(closed)
    while len(stack) > 1:  # cut off
        stack[-2].append(tuple(stack.pop()))
    return stack[0][0] if stack[0] else ()


_MAX_BYTES = 1 << 64  # a larger array comes from broken text
_MAX_NESTED = 64  # tuples in tuples; XLA's stay under ten
_SHAPE_TOKEN = re.compile(r"/\*[^*]*+\*/|[()]|(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\](?:\{(?P<layout>[^{}]*)\})?")


def _array(match: re.Match[str]) -> Array:
    dtype, dims, layout = match["dtype"], match["dims"], match["layout"] or ""
    sizes = tuple(int(size) for size in re.findall(r"\d{1,18}", dims))
    bits = _BITS.get(dtype)
    if bits is None and _EIGHT_BIT_FLOAT.match(dtype):
        bits = 8
    element = _ELEMENT_BITS.search(layout)
    space = _SPACE.search(layout)
    return Array(dtype, sizes, int(element[1]) if element else bits, int(space[1]) if space else 0)


def arrays(shape: Shape) -> Iterator[Array]:
    """Yield the arrays of a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from arrays(part)


def elements(shape: Shape) -> int:
    """Return how many elements a shape has in all."""
    total = 0
    for array in arrays(shape):
        count = 1
        for size in array.dims:
            count *= size
        total += count
    return total


def bytes_of(shape: Shape) -> int | None:
    """Return the bytes of a shape without padding, or None when an element type is unknown or the size absurd."""
    total = 0
    for array in arrays(shape):
        if array.bits is None:
            return None
        count = array.bits
        for size in array.dims:
            count *= size
        total += (count + 7) // 8
    return total if total < _MAX_BYTES else None


# --- replica groups -----------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Who takes part in a collective together."""

    size: int | None  # devices of one group; None is unknown
    axes: tuple[str, ...]  # the mesh axes the text names, such as ("fsdp", "expert") or ("fsdp:(16)2",)
    mesh: tuple[tuple[str, int], ...]  # the named mesh, in order
    members: tuple[tuple[int, ...], ...] | None  # device ids of the groups, where the text says


_MESH = re.compile(r"mesh\[([^\]]*)\].*\{([^{}]*)\}$", re.DOTALL)
_AXIS = re.compile(r"'?([^',=]+?)'?=(\d{1,9})")
_AXIS_REF = re.compile(r"'?([^',{}:]+?)'?(?::\((\d{1,9})\)(\d{1,9}))?(?:,|$)")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MAX_DEVICES = 1 << 16  # groups of more devices are not written out


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,18}", text))


@lru_cache(maxsize=1024)
def read_groups(value: str) -> Groups:
    """Return the groups of a `replica_groups=` value in any of its three spellings; `{}` has size None."""
    mesh = _MESH.match(value)
    if mesh is not None:
        return _mesh_groups(value, mesh)
    iota = _IOTA.match(value)
    if iota is not None:
        return _iota_groups(_numbers(iota[1]), _numbers(iota[2]), _numbers(iota[3] or ""))
    members = tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", value))
    size = max((len(group) for group in members), default=None)
    return Groups(size, (), (), members or None)


def _strided(sizes: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Return iota(product(sizes)) reshaped to `sizes`, transposed by `order` and flattened."""
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    found = [0]
    for axis in order:
        found = [base + step * strides[axis] for base in found for step in range(sizes[axis])]
    return found


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _iota_groups(shape: tuple[int, ...], dims: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    if not shape:
        return Groups(None, (), (), None)
    size = shape[-1]
    order = order or tuple(range(len(dims)))
    devices = _product(dims)
    if devices != _product(shape) or devices > _MAX_DEVICES or sorted(order) != list(range(len(dims))):
        return Groups(size, (), (), None)
    flat = _strided(dims, order)
    members = tuple(tuple(flat[begin : begin + size]) for begin in range(0, devices, size)) if size else None
    return Groups(size, (), (), members)


def _mesh_groups(value: str, match: re.Match[str]) -> Groups:
    mesh = tuple((name.strip(), int(size)) for name, size in _AXIS.findall(match[1]))
    sizes = dict(mesh)
    axes, count, whole = [], 1, True
    for name, before, size in _AXIS_REF.findall(match[2]):
        if name not in sizes:
            return Groups(None, (), mesh, None)
        if size:
            axes.append(f"{name}:({before}){size}")
            count, whole = count * int(size), False
        else:
            axes.append(name)
            count *= sizes[name]
    plain = whole and "device_ids" not in value
    return Groups(count, tuple(axes), mesh, mesh_members(mesh, tuple(axes)) if plain else None)


def mesh_members(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups along `axes` of a mesh whose devices are numbered in order, or None when it is too large."""
    names, sizes = [name for name, _ in mesh], tuple(size for _, size in mesh)
    devices = _product(sizes)
    if not 0 < devices <= _MAX_DEVICES:
        return None
    inner = tuple(names.index(axis) for axis in axes)
    outer = tuple(axis for axis in range(len(names)) if axis not in inner)
    flat = _strided(sizes, outer + inner)
    size = _product(tuple(sizes[axis] for axis in inner))
    return tuple(tuple(flat[begin : begin + size]) for begin in range(0, devices, size))


def permute_ring(value: str) -> int | None:
    """Return the most devices that a `source_target_pairs=` value links together; 1 when all pairs stay put."""
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\{\s*(\d{1,18})\s*,\s*(\d{1,18})\s*\}", value)]
    if not pairs:
        return None
    parent: dict[int, int] = {}

    def top(device: int) -> int:
        parent.setdefault(device, device)
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    for source, target in pairs:
        parent[top(source)] = top(target)
    counts: dict[int, int] = {}
    for device in list(parent):
        counts[top(device)] = counts.get(top(device), 0) + 1
    return max(counts.values())
