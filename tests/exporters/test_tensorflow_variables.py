"""The pure function of a TensorFlow step that changes variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphscale.errors import ExportError

pytestmark = pytest.mark.tensorflow

ROWS = np.array([2, 0, 2])


def test_reads_and_writes_keep_their_order() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from graphscale.exporters.tensorflow.pure_step import make_pure

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
    assert list(pure.specs) == ["x", *pure.first] == ["x", "w", "total", "rate"]
    assert pure.pairs == {"w.next": "w", "total.next": "total"}
    assert pure.outputs == ["after", "before", "w.next", "total.next"]
    made = tf.function(pure.run, autograph=False)(*map(tf.constant, (x, *pure.first.values())))
    outputs = step(tf.constant(x))
    wanted = [outputs["after"], outputs["before"], w, total]
    for actual, expected in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    # The first values, not those that the step left.
    assert pure.first["total"] == 0 and (pure.first["w"] == 1).all()


def test_a_step_that_cannot_be_made_pure_is_refused_with_the_variable_that_it_changes() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from graphscale.exporters.tensorflow.pure_step import make_pure

    w = tf.Variable(np.ones(3, np.float32), name="kernel")
    fused = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    x = {"x": np.ones(3, np.float32)}

    with pytest.raises(ExportError, match="assigns the variable kernel:0, which belongs to neither the model nor"):
        make_pure(lambda value: {"y": w.assign_add(value) + 0.0}, x, {})

    def step(value: Any) -> dict[str, Any]:
        fused.apply_gradients([(value, w)])
        return {"y": value * 2.0}

    with pytest.raises(ExportError, match="uses the variable kernel:0 in ResourceApplyGradientDescent"):
        make_pure(step, x, {"w": w})
    with pytest.raises(ExportError, match="assigns a variable that belongs to neither the model nor"):
        make_pure(step, x, {})


def test_restarted_variables_begin_each_step_anew() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from graphscale.exporters.tensorflow.pure_step import make_pure

    total = tf.Variable(np.float32(2))
    pure = make_pure(lambda x: {"total": total.assign_add(x) + 0.0}, {"x": np.float32(3)}, {}, [total])
    assert (list(pure.specs), pure.pairs) == (["x"], {})
    total.assign(100.0)
    run = tf.function(pure.run, autograph=False)
    assert [float(run(tf.constant(3.0))[0]) for _ in range(2)] == [5, 5]


def test_a_function_inside_the_step_is_a_part_of_it() -> None:
    tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
    from graphscale.exporters.tensorflow.pure_step import make_pure

    w = tf.Variable(np.float32(2))
    inner = tf.function(lambda x: w.assign_add(x) * 1.0)
    pure = make_pure(lambda x: {"y": inner(x)}, {"x": np.float32(3)}, {"w": w})
    run = tf.function(pure.run, autograph=False)
    assert [float(value) for value in run(tf.constant(1.0), tf.constant(10.0))] == [11, 11]
    assert not tf.config.functions_run_eagerly()
