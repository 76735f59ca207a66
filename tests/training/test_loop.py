"""The loop on real steps: the content of records, the unchanged state of a skipped step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import graphscale as gs
from graphscale.training.data import Batches, Data
from graphscale.training.loop import Trainer
from graphscale.training.schedules import LearningRate
from tests.conftest import assert_all_same_bits
from tests.training.runs import OVERFLOWS, SAMPLES, make_digits, options, train


def test_a_skipped_step_does_not_advance_the_learning_rate(tmp_path: Path) -> None:
    make_digits(tmp_path)
    rate = LearningRate(0.05, "cosine", warmup=10)
    records, _ = train(options(tmp_path, learning_rate=rate, batch_size=20, epochs=3))
    skipped = [record.step for record in records if not record.applied]
    batches = Batches(Data({"n": np.arange(SAMPLES)}, SAMPLES, None), 20)
    with_overflow = [n + 1 for n in range(len(records)) if set(OVERFLOWS) & set(batches[n]["n"].tolist())]
    assert skipped == with_overflow, "the steps with an infinite pixel, and no others"
    assert 3 <= len(skipped) <= 6
    fitted = rate.for_run(45)
    applied = 0
    for record in records:
        assert record.learning_rate == fitted(applied)
        applied += record.applied
    assert applied == 45 - len(skipped)


def test_the_records_follow_the_rule(tmp_path: Path) -> None:
    make_digits(tmp_path)
    records, _ = train(options(tmp_path, learning_rate=LearningRate(0.05), epochs=4))
    per_epoch = -(-SAMPLES // 32)
    eager = gs.DynamicLossScale(2.0**12, increment_period=5)
    for number, record in enumerate(records):
        assert (record.step, record.epoch) == (number + 1, number // per_epoch + 1)
        assert record.loss_scale == eager()
        assert eager.update([np.float32(0 if record.applied else np.inf)])[1] == record.applied
        assert (record.next_loss_scale, record.good_steps) == (eager(), eager.num_good_steps)
        assert np.isfinite(record.loss) == record.applied
        assert record.learning_rate == 0.05
    assert {record.applied for record in records} == {True, False}


def test_the_run_is_that_of_a_session_by_hand(tmp_path: Path) -> None:
    make_digits(tmp_path)
    records, trained = train(options(tmp_path, learning_rate=LearningRate(0.05), batch_size=16, epochs=2, seed=7))
    stored = np.load(tmp_path / "data.npz")
    session = gs.Session(tmp_path / "step.onnx", state=dict(np.load(tmp_path / "state.npz")))
    losses = []
    for epoch in range(2):
        order = np.random.default_rng([7, epoch]).permutation(SAMPLES)
        for start in range(0, SAMPLES, 16):
            chosen = order[start : start + 16]
            feeds = {name: stored[name][chosen] for name in stored.files}
            losses.append(float(session.step({**feeds, "learning_rate": np.float32(0.05)})["loss"]))
    assert repr([record.loss for record in records]) == repr(losses)
    assert_all_same_bits(trained, session.state_dict())


def test_the_numbers_among_the_outputs_are_recorded(tmp_path: Path) -> None:
    """The scaled loss, exposed, is a number of each step; the logits are not, and nothing of the state is."""
    make_digits(tmp_path, expose_scaled_loss=True)
    records, _ = train(options(tmp_path, learning_rate=LearningRate(0.05), batch_size=16, max_steps=5))
    for record in records:
        assert list(record.outputs) == ["scaled_loss"]
        assert record.outputs["scaled_loss"] == np.float32(record.loss) * np.float32(record.loss_scale)


def test_an_input_of_shape_one_takes_the_learning_rate(tmp_path: Path) -> None:
    import onnx

    model = onnx.load(Path(gs.__file__).parent / "demo" / "digits_step.onnx")
    (rate,) = (value for value in model.graph.input if value.name == "learning_rate")
    rate.type.tensor_type.shape.dim.add().dim_value = 1
    make_digits(tmp_path)
    gs.scale(model).save(tmp_path / "step.onnx")
    records, _ = train(options(tmp_path, learning_rate=LearningRate(0.05), max_steps=3))
    assert [record.learning_rate for record in records] == [0.05] * 3


def test_batches_come_from_anything_with_numbers(tmp_path: Path) -> None:
    make_digits(tmp_path)
    rng = np.random.default_rng(0)

    class Endless(Batches):
        per_epoch = 10

        def __init__(self) -> None:
            pass

        def __getitem__(self, number: int) -> dict[str, np.ndarray]:
            return {"images": rng.random((4, 64), dtype=np.float32), "labels": rng.integers(0, 10, 4)}

    session = gs.Session(tmp_path / "step.onnx", state=dict(np.load(tmp_path / "state.npz")))
    trainer = Trainer(session, Endless(), LearningRate(0.01))
    assert [record.epoch for record in trainer.run(25)] == [1] * 10 + [2] * 10 + [3] * 5
    assert (trainer.steps, trainer.applied) == (25, 25)
