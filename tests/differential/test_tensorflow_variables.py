"""The pure function of a step that changes variables, which models/tensorflow exports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow

ROWS = np.array([2, 0, 2])


def test_reads_and_writes_keep_their_order() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from models.tensorflow.pure import make_pure

    w, total, rate = (tf.Variable(np.float32(value)) for value in (np.ones((3, 2)), 0, 0.5))
    frozen, unread = tf.Variable(np.float32(3)), tf.Variable(np.float32(7))

    def step(x: Any) -> dict[str, Any]:
        before = tf.reduce_sum(tf.gather(w, ROWS))
        w.scatter_add(tf.IndexedSlices(x, ROWS))
        w.scatter_sub(tf.IndexedSlices(rate * x, ROWS))
        total.assign_add(tf.reduce_sum(w))
        total.assign(total * frozen)
        total.assign_sub(1.0)
        return {"before": before, "after": total + 0.0}

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    pure = make_pure(step, {"x": x}, {"w": w, "total": total, "rate": rate, "unread": unread})
    assert list(pure.inputs) == ["x", "w", "total", "rate"]
    assert pure.outputs == ["after", "before", "w.next", "total.next"]
    made = tf.function(pure.run, autograph=False)(*map(tf.constant, pure.inputs.values()))
    outputs = step(tf.constant(x))
    wanted = [outputs["after"], outputs["before"], w, total]
    for actual, expected in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    # The first values, not those that the step left.
    assert pure.inputs["total"] == 0 and (pure.inputs["w"] == 1).all()


def test_a_step_that_cannot_be_made_pure_is_refused_with_the_variable_that_it_changes() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from models.tensorflow.pure import make_pure

    w = tf.Variable(np.ones(3, np.float32), name="kernel")
    fused = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    x = {"x": np.ones(3, np.float32)}

    with pytest.raises(ValueError, match="assigns kernel:0, which is not in the state"):
        make_pure(lambda value: {"y": w.assign_add(value) + 0.0}, x, {})

    def step(value: Any) -> dict[str, Any]:
        fused.apply_gradients([(value, w)])
        return {"y": value * 2.0}

    with pytest.raises(NotImplementedError, match="ResourceApplyGradientDescent on the variable kernel:0"):
        make_pure(step, x, {"w": w})
    with pytest.raises(ValueError, match="writes to something that is not in the state"):
        make_pure(step, x, {})
