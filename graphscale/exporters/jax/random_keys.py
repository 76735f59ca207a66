"""Random numbers by Threefry 2x32, in integer arithmetic.

The hash is that of J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), and JAX's uses of it are those
of its documentation, jax.random, with `jax_threefry_partitionable`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphscale.errors import ExportError
from graphscale.exporters.jax.rewriting import KeyWords, rule

__all__: list[str] = []

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


@rule("threefry2x32")
def _hash(key1: Any, key2: Any, x1: Any, x2: Any, **_: Any) -> tuple[Any, Any]:
    keys = [_signed(key1), _signed(key2)]
    keys.append(keys[0] ^ keys[1] ^ np.int32(_PARITY))
    x, y = _signed(x1) + keys[0], _signed(x2) + keys[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ _rotate_left(y, distance)
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + np.int32(block + 1)
    return lax.convert_element_type(x, np.uint32), lax.convert_element_type(y, np.uint32)


def _signed(x: Any) -> Any:
    """Return the same bits as a signed integer, which every build of ONNX Runtime can add."""
    return lax.convert_element_type(x, np.int32)


def _rotate_left(x: Any, distance: int) -> Any:
    bits = lax.convert_element_type(x, np.uint32)
    left = lax.shift_left(bits, jnp.full_like(bits, distance))
    return _signed(left | lax.shift_right_logical(bits, jnp.full_like(bits, 32 - distance)))


def _known(impl: Any) -> None:
    if getattr(impl, "name", str(impl)) != "threefry2x32":
        raise ExportError(f"the step draws random numbers by {getattr(impl, 'name', impl)}; use threefry2x32 keys")


@rule("random_wrap")
def _wrap(words: Any, impl: Any) -> KeyWords:
    _known(impl)
    high, low = (lax.index_in_dim(jnp.asarray(words), index, -1, keepdims=False) for index in (0, 1))
    return KeyWords(high, low)


@rule("random_unwrap")
def _unwrap(key: KeyWords) -> Any:
    return jnp.stack([jnp.asarray(key.high), jnp.asarray(key.low)], -1)


@rule("random_clone")
def _clone(key: KeyWords) -> KeyWords:
    return key


@rule("random_seed")
def _seed(seed: Any, impl: Any) -> KeyWords:
    _known(impl)
    if seed.dtype.itemsize > 4:
        raise ExportError("the step makes a random key of a 64-bit seed: make it of an int32")
    low = lax.convert_element_type(seed, np.uint32)
    return KeyWords(jnp.zeros_like(low), low)


@rule("random_split")
def _split(key: KeyWords, shape: tuple[int, ...]) -> KeyWords:
    return KeyWords(*_hash_counts(key, shape))


@rule("random_fold_in")
def _fold_in(key: KeyWords, data: Any) -> KeyWords:
    low = lax.convert_element_type(jnp.asarray(data), np.uint32)
    low = jnp.broadcast_to(low, jnp.shape(key.high))
    high = jnp.broadcast_to(key.high, jnp.shape(low))
    return KeyWords(*_hash(high, jnp.broadcast_to(key.low, jnp.shape(low)), jnp.zeros_like(low), low))


@rule("random_bits")
def _bits(key: KeyWords, bit_width: int, shape: tuple[Any, ...]) -> Any:
    if bit_width == 64:
        raise ExportError("the step draws 64 random bits at a time: draw float32 numbers")
    high, low = _hash_counts(key, shape)
    bits = lax.bitwise_xor(high, low)
    return bits if bit_width == 32 else lax.convert_element_type(bits, np.dtype(f"uint{bit_width}"))


def _hash_counts(key: KeyWords, shape: tuple[Any, ...]) -> tuple[Any, Any]:
    """Hash the numbers of the elements of a shape, for each key."""
    keys = np.ndim(key.high) if not hasattr(key.high, "ndim") else key.high.ndim
    if not jax.config.jax_threefry_partitionable:
        raise ExportError("the step needs jax_threefry_partitionable, which is JAX's default: switch it on")
    counts = jnp.zeros(shape, np.int32)
    size: Any = 1
    for axis in reversed(range(len(shape))):
        counts = counts + lax.broadcasted_iota(np.int32, shape, axis) * size
        size = size * shape[axis]
    counts = lax.convert_element_type(counts, np.uint32)
    wide = (*key.high.shape, *shape)
    words = [jnp.broadcast_to(lax.expand_dims(jnp.asarray(word), range(keys, len(wide))), wide) for word in key]
    counts = jnp.broadcast_to(counts, wide)
    high, low = _hash(*words, jnp.zeros_like(counts), counts)
    return high, low


@rule("bitcast_convert_type")
def _bitcast(x: Any, new_dtype: Any, **_: Any) -> Any:
    """Compute the float32 of bits by arithmetic: no operator of ONNX reads bits as a number."""
    new = np.dtype(new_dtype)
    if {x.dtype, new} <= {np.dtype("int32"), np.dtype("uint32")}:
        return lax.convert_element_type(x, new)
    if new != np.float32 or x.dtype not in (np.uint32, np.int32):
        raise ExportError(f"jax2onnx has no translation for bitcast_convert_type, from {x.dtype} to {new}")
    bits = _signed(x)
    exponent = lax.convert_element_type(_signed(_shift(bits, 23)) & np.int32(255), np.float32)
    fraction = lax.convert_element_type(bits & np.int32(0x7FFFFF), np.float32)
    size = (1 + fraction * np.float32(2**-23)) * jnp.exp2(exponent - 127)
    return jnp.where(bits < 0, -size, size)


def _shift(bits: Any, distance: int) -> Any:
    unsigned = lax.convert_element_type(bits, np.uint32)
    return lax.shift_right_logical(unsigned, jnp.full_like(unsigned, distance))
