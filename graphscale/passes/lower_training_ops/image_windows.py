"""The windows of convolutions and poolings, and the way back from windows to the image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from graphscale.passes.lower_training_ops.writer import Writer

__all__ = ["Sizes", "Window", "spatial"]

# The sizes of spatial axes, None for unknown ones.
Sizes = Sequence[int | None]


@dataclasses.dataclass(frozen=True)
class Window:
    """The moving window over an image, with a number for each spatial axis.

    Attributes:
        kernel: the sizes of the window.
        strides: the steps between places of the window.
        dilations: the steps inside the window.
        begin: the padding before the image.
        end: the padding behind the image.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, f: Writer, kernel: Sequence[int], image: Sizes) -> Window:
        """Return the window of a node over an image.

        With auto_pad, the padding of ONNX's schema is `(ceil(image / stride) - 1) * stride + reach - image` in all.
        SAME_UPPER has the larger half behind the image, and SAME_LOWER before it.
        """
        ones = [1] * len(kernel)
        strides, dilations = f.attribute("strides", ones), f.attribute("dilations", ones)
        pads, auto = list(f.attribute("pads", [0] * 2 * len(kernel))), f.attribute("auto_pad", "NOTSET")
        if auto != "NOTSET":
            pads = [0] * len(pads)
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            for i, (size, k, stride, dilation) in enumerate(zip(image, kernel, strides, dilations, strict=True)):
                if size is None and stride > 1:
                    raise f.refusal(f"auto_pad of axis {i + 2} depends on its size; run shape inference on the model")
                last = stride if size is None else size % stride or stride
                total = max((k - 1) * dilation + 1 - last, 0)
                less, more = total // 2, total - total // 2
                pads[i], pads[i + len(kernel)] = (less, more) if auto == "SAME_UPPER" else (more, less)
        begin, end = pads[: len(kernel)], pads[len(kernel) :]
        return cls(*(tuple(map(int, numbers)) for numbers in (kernel, strides, dilations, begin, end)))

    @property
    def reach(self) -> tuple[int, ...]:
        """The sizes of the image below the window."""
        return tuple((k - 1) * dilation + 1 for k, dilation in zip(self.kernel, self.dilations, strict=True))

    @property
    def options(self) -> dict[str, Any]:
        """The attributes of a convolution with this window."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": (*self.begin, *self.end),
        }

    def scatter(self, f: Writer, y: ir.Value, weight: ir.Value, image: Sizes, like: ir.Value, group: int) -> ir.Value:
        """Add up weighted windows at their places in the image: a transposed convolution with the image's sizes.

        Args:
            f: the writer.
            y: the factors of the windows, one per place.
            weight: the weights inside a window.
            image: the spatial sizes of the image.
            like: the shape of the image, as a value, for unknown sizes.
            group: the groups of channels.
        """
        options: dict[str, Any] = {**self.options, "group": group}
        steps = zip(image, spatial(f, y, len(image)), self.strides, self.reach, self.begin, strict=True)
        rests = [
            None if size is None or count is None else size - ((count - 1) * stride + reach - begin)
            for size, count, stride, reach, begin in steps
        ]
        known = [rest for rest in rests if rest is not None]
        if len(known) == len(rests):
            options["pads"] = (*self.begin, *(max(-rest, 0) for rest in known))
            return f("ConvTranspose", y, weight, **options, output_padding=[max(rest, 0) for rest in known])
        options["pads"] = (*self.begin, *[0] * len(rests))
        whole = f("ConvTranspose", y, weight, **options, output_padding=[stride - 1 for stride in self.strides])
        axes = range(2, 2 + len(rests))
        sizes = f("Slice", like, f.integers(2), f.integers(2 + len(rests)))
        return f("Slice", whole, f.integers(*[0] * len(rests)), sizes, f.integers(*axes))


def spatial(f: Writer, value: ir.Value, count: int) -> Sizes:
    """Return the sizes of a number of axes behind batch and channels."""
    sizes = f.shape(value)
    return [None] * count if sizes is None else sizes[2:]
