"""Resampling, sampling at places, and Fourier transforms."""

from __future__ import annotations

import numpy as np

from tests.operators.recipes.draw import Call, Draw, recipe

_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@recipe("Resize")
def draw_resize(draw: Draw) -> Call:
    shape = (draw.size(1, 2), draw.size(1, 2), draw.size(2, 4), draw.size(2, 4))
    mode = draw.word("nearest", "linear", *(("cubic",) if draw.opset >= 11 else ()))
    attributes = {"mode": mode}
    scales = np.asarray([1, 1, draw.pick(0.5, 1, 2), draw.pick(0.5, 1, 1.5)], np.float32)
    if draw.opset < 11:
        return Call([draw.floats(shape), scales], attributes)
    transforms = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
    transforms += ["tf_half_pixel_for_nn"] if draw.opset < 13 else []
    transforms += ["half_pixel_symmetric"] if draw.opset >= 19 else []
    attributes |= draw.options(coordinate_transformation_mode=transforms, nearest_mode=_NEAREST)
    attributes |= draw.options(
        exclude_outside=(0, 1) if mode == "cubic" else (0,),
        cubic_coeff_a=(-0.75, -0.5),
        extrapolation_value=(0.0, 1.5, -2.0),
    )
    if draw.opset >= 18 and mode != "nearest":
        attributes |= draw.options(antialias=(0, 1))
    roi = None
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = np.asarray([0, 0, draw.pick(0.25, -0.5), 0.1, 1, 1, draw.pick(0.75, 1.5), 0.9], np.float32)
    elif draw.opset < 13:
        roi = np.zeros(0, np.float32)
    if draw.chance(40):
        sizes = np.asarray([*shape[:2], draw.size(1, 5), draw.size(1, 5)], np.int64)
        return Call([draw.floats(shape), roi, np.zeros(0, np.float32) if draw.opset < 13 else None, sizes], attributes)
    return Call([draw.floats(shape), roi, scales], attributes)


@recipe("RoiAlign")
def draw_roi_align(draw: Draw) -> Call:
    x, count = draw.floats((2, draw.size(1, 2), 5, 5)), draw.size(1, 3)
    corner = np.abs(draw.floats((count, 2))) / 2
    boxes = np.concatenate([corner, corner + np.abs(draw.floats((count, 2)))], 1).astype(draw.dtype)
    attributes = draw.options(mode=("avg", "max"), output_height=(1, 2), output_width=(1, 2), sampling_ratio=(0, 1, 2))
    if draw.opset >= 16:
        attributes |= draw.options(coordinate_transformation_mode=("half_pixel", "output_half_pixel"))
    return Call([x, boxes, draw.integers(0, 2, (count,))], {**attributes, **draw.options(spatial_scale=(0.5, 1.0))})


@recipe("MaxRoiPool")
def draw_max_roi_pool(draw: Draw) -> Call:
    boxes = np.asarray([[0, 0, 0, 2, 3], [1, 1, 1, 3, 3]], draw.dtype)
    return Call([draw.floats((2, 2, 5, 5)), boxes], {"pooled_shape": [draw.size(1, 2), 2]})


@recipe("GridSample")
def draw_grid_sample(draw: Draw) -> Call:
    spatial = draw.pick(2, 2, 3) if draw.opset >= 20 else 2
    n, places = draw.size(1, 2), [draw.size(1, 3) for _ in range(spatial)]
    x = draw.floats((n, draw.size(1, 2), *(draw.size(2, 4) for _ in range(spatial))))
    modes = ("linear", "nearest", "cubic") if draw.opset >= 20 else ("bilinear", "nearest", "bicubic")
    if spatial == 3:
        modes = modes[:2]
    attributes = draw.options(mode=modes, padding_mode=("zeros", "border", "reflection"), align_corners=(0, 1))
    return Call([x, np.asarray(draw.floats((n, *places, spatial)) / 3, draw.dtype)], attributes)


@recipe("AffineGrid")
def draw_affine_grid(draw: Draw) -> Call:
    spatial, n = draw.pick(2, 3), draw.size(1, 2)
    size = np.asarray([n, 2, *(draw.size(1, 3) for _ in range(spatial))], np.int64)
    return Call([draw.floats((n, spatial, spatial + 1)), size], draw.options(align_corners=(0, 1)))


@recipe("DFT")
def draw_dft(draw: Draw) -> Call:
    inverse, one_sided = draw.pick(0, 1), draw.pick(0, 0, 1)
    parts = 2 if inverse or (draw.chance() and not one_sided) else 1
    shape = (draw.size(1, 2), draw.pick(4, 5, 8), draw.size(1, 3), parts)
    inverse = 0 if one_sided else inverse
    attributes = {"inverse": inverse, "onesided": one_sided}
    length = np.asarray(draw.pick(3, 4, 8), np.int64) if draw.chance(30) else None
    x = draw.floats(shape[:3] + ((1,) if one_sided else shape[3:]))
    if draw.opset < 20:
        return Call([x, length], {**attributes, **draw.options(axis=(1, 2))})
    return Call([x, length, np.asarray(draw.pick(1, -2), np.int64) if draw.chance() else None], attributes)


@recipe("STFT")
def draw_stft(draw: Draw) -> Call:
    n, length, frame = draw.size(1, 2), draw.size(8, 12), 4
    signal = draw.floats((n, length, 1))
    step = np.asarray(draw.size(1, 3), np.int64)
    window = draw.floats((frame,)) if draw.chance(70) else None
    size = np.asarray(frame, np.int64) if window is None or draw.chance() else None
    return Call([signal, step, window, size], draw.options(onesided=(0, 1)))
