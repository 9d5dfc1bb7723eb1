"""Masks of images and videos: neighbourhoods, sliding tiles, frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attngen.bench.mods.mod import Made, case, mask
from attngen.ir.sizes import Sizes

Tensor = torch.Tensor


def _near(
    at: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], canvas: Sequence[int], kernel: Sequence[int]
) -> Tensor:
    """True where the pixel `other`, (row, column), is in the window of the pixel `at`. The window is centred at `at`
    and shifted inwards at the canvas's edges.

    canvas, kernel: height and width; the kernel's are odd. (Hassani et al. 2023, Neighborhood Attention Transformer.)
    """
    row_reach, column_reach = kernel[0] // 2, kernel[1] // 2
    row = at[0].clamp(row_reach, canvas[0] - 1 - row_reach)
    column = at[1].clamp(column_reach, canvas[1] - 1 - column_reach)
    return ((row - other[0]).abs() <= row_reach) & ((column - other[1]).abs() <= column_reach)


def _natten(
    sizes: Sizes, device: torch.device, generator: torch.Generator, canvas: Sequence[int], kernel: Sequence[int]
) -> Made:
    """Neighbourhood attention; pixels are numbered row by row."""
    width = canvas[1]

    def in_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return _near((q_idx // width, q_idx % width), (kv_idx // width, kv_idx % width), canvas, kernel)

    order = torch.arange(sizes.n_q, device=device).view(*canvas)
    return Made(None, in_window, device, data={"order": order, "kernel": tuple(kernel)})


def _tiled_natten(
    sizes: Sizes,
    device: torch.device,
    generator: torch.Generator,
    canvas: Sequence[int],
    kernel: Sequence[int],
    tile: Sequence[int],
) -> Made:
    """Neighbourhood attention; pixels are numbered tile by tile, and row by row within each."""
    (height, width), (rows, columns) = canvas, tile
    area, across = rows * columns, canvas[1] // columns

    def pixel(position: Tensor) -> tuple[Tensor, Tensor]:
        number, inside = position // area, position % area
        return number // across * rows + inside // columns, number % across * columns + inside % columns

    def in_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return _near(pixel(q_idx), pixel(kv_idx), canvas, kernel)

    tiles = torch.arange(sizes.n_q, device=device).view(height // rows, across, rows, columns)
    return Made(
        None, in_window, device, data={"order": tiles.transpose(1, 2).reshape(height, width), "kernel": tuple(kernel)}
    )


def _every_other_bit(code: Tensor) -> Tensor:
    """Return bits 0, 2, 4, ... of up to 32 bits, packed together."""
    code = code & 0x55555555
    for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        code = (code | (code >> shift)) & kept
    return code


def _morton_natten(
    sizes: Sizes, device: torch.device, generator: torch.Generator, canvas: Sequence[int], kernel: Sequence[int]
) -> Made:
    """Neighbourhood attention; pixels are numbered along a Z-order curve: the even bits of an index are the column, the
    odd ones the row.

    Both sizes of the canvas are powers of two, and its width is its height or twice that, so that every index occurs.
    """

    def in_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at, other = ((_every_other_bit(i >> 1), _every_other_bit(i)) for i in (q_idx, kv_idx))
        return _near(at, other, canvas, kernel)

    order = torch.zeros(1, 1, dtype=torch.int64, device=device)
    while order.numel() < sizes.n_q:  # append a copy of the curve to its right or below it
        is_square = order.shape[0] == order.shape[1]
        order = torch.cat([order, order + order.numel()], dim=1 if is_square else 0)
    return Made(None, in_window, device, data={"order": order, "kernel": tuple(kernel)})


def _windows(length: int, reach: int) -> Tensor:
    """Return which of `length` places along an axis are in the window of each place: `reach` of them, around it and
    inside the axis."""
    visible = torch.zeros(length, length, dtype=torch.bool)
    for place in range(length):
        start = min(max(place - reach // 2, 0), length - reach)
        visible[place, start : start + reach] = True
    return visible


def _natten_reference(made: Made, sizes: Sizes) -> Tensor:
    order, kernel = made.data["order"], made.data["kernel"]
    rows, columns = (_windows(n, reach).to(made.device) for n, reach in zip(order.shape, kernel))
    pixels = rows[:, None, :, None] & columns[None, :, None, :]
    numbers = order.flatten()
    visible = torch.empty(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    visible[numbers[:, None], numbers] = pixels.reshape(sizes.n_q, sizes.n_kv)
    return visible


def _around(tiles: int, kernel: int) -> tuple[int, int, int, int]:
    """Return the numbers of tiles before and after the centre, and the least and greatest centre. An even kernel has
    one more tile before its centre."""
    before, after = kernel // 2, (kernel - 1) // 2
    return before, after, before, tiles - 1 - after


def _with_text(q_idx: Tensor, kv_idx: Tensor, near: Tensor, pixels: int, text: int) -> Tensor:
    """Pixels see the pixels near them and the text; text sees both. Positions after the text are padding, which nothing
    sees."""
    both = (q_idx < pixels) & (kv_idx < pixels) & near
    text_keys = (q_idx < pixels) & (kv_idx >= pixels) & (kv_idx < pixels + text)
    return both | text_keys | ((q_idx >= pixels) & (kv_idx < pixels + text))


def _sliding_tiles_2d(
    sizes: Sizes,
    device: torch.device,
    generator: torch.Generator,
    canvas: Sequence[int],
    kernel: Sequence[int],
    tile: Sequence[int],
    text: int,
) -> Made:
    """Sliding tile attention on an image: a tile sees the tiles in a window around it. Pixels are numbered tile by
    tile, followed by the text.

    canvas, kernel, tile: height and width, the first two multiples of the third. (Zhang et al. 2025, Fast Video
    Generation with Sliding Tile Attention.)
    """
    pixels, area, across = math.prod(canvas), math.prod(tile), canvas[1] // tile[1]
    before_h, after_h, least_h, most_h = _around(canvas[0] // tile[0], kernel[0] // tile[0])
    before_w, after_w, least_w, most_w = _around(across, kernel[1] // tile[1])

    def in_tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_tile, kv_tile = q_idx // area, kv_idx // area
        row, column = (q_tile // across).clamp(least_h, most_h), (q_tile % across).clamp(least_w, most_w)
        kv_row, kv_column = kv_tile // across, kv_tile % across
        in_rows = (kv_row >= row - before_h) & (kv_row <= row + after_h)
        in_columns = (kv_column >= column - before_w) & (kv_column <= column + after_w)
        return _with_text(q_idx, kv_idx, in_rows & in_columns, pixels, text)

    return Made(
        None,
        in_tiles,
        device,
        data={"canvas": tuple(canvas), "kernel": tuple(kernel), "tile": tuple(tile), "text": text},
    )


def _sliding_tiles_3d(
    sizes: Sizes,
    device: torch.device,
    generator: torch.Generator,
    canvas: Sequence[int],
    kernel: Sequence[int],
    tile: Sequence[int],
    text: int,
) -> Made:
    """Sliding tile attention on a video, as on an image. canvas, kernel, tile: frames, height and width."""
    pixels, volume = math.prod(canvas), math.prod(tile)
    down, across = canvas[1] // tile[1], canvas[2] // tile[2]
    before_t, after_t, least_t, most_t = _around(canvas[0] // tile[0], kernel[0] // tile[0])
    before_h, after_h, least_h, most_h = _around(down, kernel[1] // tile[1])
    before_w, after_w, least_w, most_w = _around(across, kernel[2] // tile[2])

    def place(position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = position // volume
        return number // (down * across), number % (down * across) // across, number % across

    def in_tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        time, row, column = place(q_idx)
        time, row, column = time.clamp(least_t, most_t), row.clamp(least_h, most_h), column.clamp(least_w, most_w)
        kv_time, kv_row, kv_column = place(kv_idx)
        in_times = (kv_time >= time - before_t) & (kv_time <= time + after_t)
        in_rows = (kv_row >= row - before_h) & (kv_row <= row + after_h)
        in_columns = (kv_column >= column - before_w) & (kv_column <= column + after_w)
        return _with_text(q_idx, kv_idx, in_times & in_rows & in_columns, pixels, text)

    return Made(
        None,
        in_tiles,
        device,
        data={"canvas": tuple(canvas), "kernel": tuple(kernel), "tile": tuple(tile), "text": text},
    )


def _sliding_tiles_reference(made: Made, sizes: Sizes) -> Tensor:
    canvas, kernel, tile, text = (made.data[name] for name in ("canvas", "kernel", "tile", "text"))
    near = torch.ones(1, 1, dtype=torch.bool)
    for n, reach, step in zip(canvas, kernel, tile):
        near = torch.kron(near, _windows(n // step, reach // step))
    near = near.repeat_interleave(math.prod(tile), 0).repeat_interleave(math.prod(tile), 1)
    pixels = math.prod(canvas)
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool)
    visible[:, pixels : pixels + text] = True
    visible[pixels:, :pixels] = True
    visible[:pixels, :pixels] = near
    return visible.to(made.device)


def _spatial(
    sizes: Sizes,
    device: torch.device,
    generator: torch.Generator,
    prompt: int,
    frame: int,
    frames: int,
    unit: int,
    first_frame: bool,
) -> Made:
    """A head that sees frames close in time: fewer than `frames * frame` tokens away, rounded down to a multiple of
    `unit`.

    All see the prompt, and with `first_frame` the first frame; the prompt sees all. (Xi et al. 2025, Sparse VideoGen.)

    frame: tokens of a frame. frames: width of the band in frames.
    """

    def in_band(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        band = math.floor(frames * frame / unit) * unit
        to_first = kv_idx < (prompt + frame if first_frame else prompt)
        return to_first | (q_idx < prompt) | (torch.abs(q_idx - kv_idx) < band)

    band = frames * frame - frames * frame % unit
    return Made(None, in_band, device, data={"prompt": prompt, "band": band, "seen": prompt + frame * first_frame})


def _spatial_reference(made: Made, sizes: Sizes) -> Tensor:
    band = made.data["band"]
    visible = torch.zeros(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    for row in range(sizes.n_q):
        visible[row, max(0, row - band + 1) : row + band] = True
    visible[: made.data["prompt"]] = True
    visible[:, : made.data["seen"]] = True
    return visible


def _temporal(
    sizes: Sizes, device: torch.device, generator: torch.Generator, prompt: int, frame: int, frames: int, count: int
) -> Made:
    """A head that sees the same places of all frames: fewer than `frames * frame // count` tokens away within the
    frame.

    All see the prompt, and the prompt sees all. (Sparse VideoGen.)

    count: frames of the video.
    """

    def same_place(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        band = frames * frame // count
        distance = torch.abs((q_idx - prompt) % frame - (kv_idx - prompt) % frame)
        return (kv_idx < prompt) | (q_idx < prompt) | (distance < band)

    return Made(None, same_place, device, data={"prompt": prompt, "frame": frame, "band": frames * frame // count})


def _temporal_reference(made: Made, sizes: Sizes) -> Tensor:
    prompt, frame, band = (made.data[name] for name in ("prompt", "frame", "band"))
    count = (sizes.n_q - prompt) // frame
    places = torch.ones(frame, frame, dtype=torch.bool, device=made.device).tril(band - 1).triu(1 - band)
    visible = torch.ones(sizes.n_q, sizes.n_kv, dtype=torch.bool, device=made.device)
    visible[prompt:, prompt:] = places.repeat(count, count)
    return visible


MODS = (
    mask(
        "natten",
        _natten,
        _natten_reference,
        (
            case(35, canvas=(5, 7), kernel=(3, 5)),
            case(144, batch=2, canvas=(12, 12), kernel=(5, 3)),
            case(60, canvas=(15, 4), kernel=(7, 1)),
        ),
        case(8192, q_heads=16, canvas=(64, 128), kernel=(13, 13)),
    ),
    mask(
        "tiled_natten",
        _tiled_natten,
        _natten_reference,
        (
            case(48, canvas=(6, 8), kernel=(3, 5), tile=(2, 4)),
            case(144, batch=2, canvas=(12, 12), kernel=(5, 3), tile=(4, 3)),
        ),
        case(8192, q_heads=16, canvas=(64, 128), kernel=(13, 13), tile=(8, 8)),
    ),
    mask(
        "morton_natten",
        _morton_natten,
        _natten_reference,
        (case(32, canvas=(4, 8), kernel=(3, 5)), case(256, batch=2, canvas=(16, 16), kernel=(5, 3))),
        case(8192, q_heads=16, canvas=(64, 128), kernel=(13, 13)),
    ),
    mask(
        "sta_2d",
        _sliding_tiles_2d,
        _sliding_tiles_reference,
        (
            case(48, canvas=(6, 8), kernel=(2, 4), tile=(2, 2), text=0),
            case(163, batch=2, canvas=(12, 12), kernel=(9, 6), tile=(3, 2), text=15),  # four positions of padding
        ),
        case(8192, q_heads=16, canvas=(64, 128), kernel=(24, 40), tile=(8, 8), text=0),
    ),
    mask(
        "sta_3d",
        _sliding_tiles_3d,
        _sliding_tiles_reference,
        (
            case(96, canvas=(4, 4, 6), kernel=(2, 4, 2), tile=(2, 2, 2), text=0),
            # Two positions of padding.
            case(231, batch=2, canvas=(6, 6, 6), kernel=(4, 6, 2), tile=(2, 3, 2), text=13),
        ),
        case(7936, q_heads=16, canvas=(16, 24, 20), kernel=(12, 8, 12), tile=(4, 8, 4), text=256),
    ),
    mask(
        "svg_spatial",
        _spatial,
        _spatial_reference,
        (
            case(142, prompt=2, frame=14, frames=2, unit=4, first_frame=True),
            case(65, batch=2, prompt=5, frame=12, frames=1, unit=5, first_frame=False),
        ),
        case(8182, q_heads=16, prompt=226, frame=612, frames=2, unit=128, first_frame=False),  # 13 frames of 18 x 34
    ),
    mask(
        "svg_temporal",
        _temporal,
        _temporal_reference,
        (case(142, prompt=2, frame=14, frames=2, count=10), case(65, batch=2, prompt=5, frame=12, frames=2, count=5)),
        case(8182, q_heads=16, prompt=226, frame=612, frames=2, count=13),
    ),
)
