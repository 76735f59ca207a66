"""In-place writes wait for all readers of a state, also for the inserted ones."""

from __future__ import annotations

import graphscale as gs
from tests.build import feeds_for, step
from tests.conftest import with_initializers


def test_a_look_at_a_view_of_several_states() -> None:
    """`k` waits for a look at `u1`, which may be `w1` or `w2` itself: their writes wait for that look."""
    model = step(
        """
        large = Greater(loss, limit)
        u1, u2 = If(large) <
            then_branch = then () => (float[4,5] a1, float[5,3] a2) { a1 = Mul(w1, k) a2 = Mul(w2, half) },
            else_branch = else () => (float[4,5] b1, float[5,3] b2) { b1 = Identity(w1) b2 = Identity(w2) }
        >
        w1_next = Sub(u1, dw1) w2_next = Sub(u2, dw2) k_next = Where(large, k, half)
        """,
        inputs="float k",
        outputs="float[4,5] w1_next, float[5,3] w2_next, float k_next",
        constants="float limit = {100}, float half = {0.5}",
    )
    states = {f"{name}_next": name for name in ("w1", "w2", "k")}
    model = with_initializers(model, {name: feeds_for(model)[name] for name in states.values()})
    result = gs.scale(model, target="ort-training", updates=states)
    assert gs.verify(model, result, runs=0, updates=states).ok
