"""Nothing is found in random training graphs once they are scaled, whether or not their metadata say so."""

from __future__ import annotations

import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphscale as gs
from graphscale.errors import UpdateError
from tests.linting.test_models import forget
from tests.random_graphs import presentations, steps

TARGETS = ("onnx", "ort-training", "ort-training-cuda")


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_nothing_is_found(data: st.DataObject) -> None:
    step = data.draw(steps())
    how = data.draw(presentations(step))
    model = step.render(how).model
    # A weight that is an initializer only cannot change: that is all that may be found in an original.
    found = {finding.code for finding in gs.lint(model).findings}
    assert found <= ({"GS501"} if how.weights == "initializer" and step.carried else set())
    try:
        scaled = gs.scale(model, target=data.draw(st.sampled_from(TARGETS))).model
    except UpdateError:  # what graphscale asks about is tested elsewhere
        return
    assert gs.lint(scaled).findings == ()
    by_hand = gs.lint(forget(ir.from_proto(scaled)))
    assert by_hand.findings == ()
    assert by_hand.loss_scale is not None and by_hand.gradients > 0
