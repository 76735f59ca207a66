"""A bench that runs both graphs, and compares results with expectations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.patterns import skip_ordering
from graphscale.checks.running.private import Copy, Results, Runner, extract, find_unseeded
from graphscale.checks.verification.finite_states import FiniteStates
from graphscale.checks.verification.oracle import Oracle
from graphscale.checks.verification.pair import Pair
from graphscale.checks.verification.rounding_noise import RoundingNoise, allow_rounding
from graphscale.checks.verification.verify_report import Case, Difference, compare_values, is_finite, same_bits
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import Arrays
from graphscale.policy.names import ScaledValue

__all__ = ["Bench"]

# A gradient in float32 is a sum of multiples of 2**-149. An update may enlarge a difference: a division by the root of
# a second moment that underflows and an epsilon of 1e-8 by 1e8. There is no bound for it, so that the original's own
# update decides.
FLOAT32_UNDERFLOW = 2.0**-130
# A backward pass in float32 with gradients below the first number does not overflow at scales up to the second.
MODEST, MODEST_SCALE = 2.0**10, 2.0**24
# Sources of expectations.
ORIGINAL, OLD = "as in the original", "as before the step"
RULE, TELEMETRY, PLAIN = "by the rule of the loss scale", "from its gradients", "in the plain form"
# Both graphs round to a small type; the unit of float16 is 2**-11. Only the original loses numbers by underflow without
# a scale.
SMALL_TOLERANCE = 2.0**-7
# A lowered step unscales elsewhere: a subnormal intermediate number may be rounded.
SUBNORMAL = 2.0**-120


class Bench:
    """Both graphs, ready to run.

    Attributes:
        oracle: the rule of the loss scale.
        original: the runner of the original, with its gradients among the outputs.
        gradients: the names in the original of the gradients that are found in both graphs.
        lacking: the names of the other gradients.
        feeds_scale: True if the scaled graph runs at any loss scale: another tool may have folded a constant one.
        seeds: number of random operators with an added seed; None if some cannot get one.
        replaced: number of replaced `IsAllFinite` operators, for the CPU, once the scaled graph is loaded.
        compared: the number of steps of both graphs with finite gradients.
        rounding: least tolerance, for the rounding of types smaller than float32.
        lost: allowed error of values for underflow in the original, with a tolerance.
        finite_states: the states that a number in the batch must not make non-finite.
    """

    def __init__(self, pair: Pair, providers: Sequence[Any] | None) -> None:
        self.pair, self.oracle = pair, Oracle(pair)
        self._providers = providers
        self._on_gpu = any("CUDA" in str(provider) for provider in providers or ())
        self._raw, quotients = pair.find_gradients()
        wanted = [gradient.name or "" for gradient in pair.analysis.gradients]
        # A sum with weight decay may have a name only in the scaled graph. For a gradient that is not found, that name
        # may belong to the scaled one.
        others = [name for name in self.oracle.gradients if pair.proved or name not in wanted]
        self._quotients = {**dict(zip(others, others, strict=True)), **quotients}
        self.gradients = tuple(self._raw)
        self.lacking = tuple(name for name in wanted if name not in self._raw)
        self._is_partial = not pair.proved and len(quotients) < max(1, len(wanted))
        scale = pair.step.scale
        self.feeds_scale = pair.proved or scale.value.is_graph_input() or scale.value in scale.states.values()
        self.replaced = self.compared = 0
        self.rounding, self.lost = allow_rounding(pair.small, SMALL_TOLERANCE if pair.small else 0.0)
        self._shown = dict.fromkeys(value.name or "" for value in pair.original.graph.outputs)
        self._known: dict[tuple[Any, ...], Arrays] = {}
        self._wholes = pair.find_tested()
        self.seeds, self._own_seeds, self._seeds = self._find_random()
        copy = Copy(pair.original, pair.states, self._own_seeds)
        copy.show([*wanted, *self._wholes])
        self._runners: list[Runner] = []
        self.original = self._make_runner(copy.model, "the original")
        self._originals = [self.original]
        found = pair.analysis
        self.finite_states = FiniteStates(
            pair.original.graph, pair.states, pair.kept, found.losses, found.gradients, set(found.batches)
        )
        self._noise = RoundingNoise(copy.model, self.original, pair.states) if pair.small else None

    @functools.cached_property
    def scaled(self) -> Runner:
        """The runner of the scaled graph, with its unscaled gradients among the outputs."""
        return self._make_runner(self._scaled_copy().model, "the scaled graph")

    @functools.cached_property
    def _lowered(self) -> Runner | None:
        lowered = self.pair.lowered
        return None if lowered is None else self._make_runner(self._copy(lowered).model, "the lowered graph")

    @property
    def untold(self) -> list[str]:
        """The names of gradients in telemetry that the scaled graph lacks."""
        return [name for name in self.oracle.gradients if self._quotients.get(name) not in self.scaled.outputs]

    def _run(self, runner: Runner, feeds: Mapping[str, Any]) -> Results:
        """Run once, with random operators that start where those of the original do."""
        runner.fresh = self.original.fresh
        return runner.run(feeds)

    def _make_runner(self, model: ir.Model, what: str) -> Runner:
        self._runners.append(Runner(model, self._providers, what))
        return self._runners[-1]

    @property
    def runs(self) -> int:
        """The number of runs of the scaled graph, in all its copies."""
        return sum(runner.runs for runner in self._runners if runner not in self._originals)

    def close(self) -> None:
        """Free all sessions."""
        for runner in self._runners:
            runner.close()
        if self._noise is not None:
            self._noise.close()

    def evaluate(self, case: Case) -> list[Difference]:
        """Run a case, and return the differences from the expectations.

        Raises:
            VerifyError: ONNX Runtime cannot run a graph.
        """
        others = {"rule": self._evaluate_rule, "skip": self._evaluate_skip, "poison": self._evaluate_poison}
        found = list(others.get(case.kind, self._evaluate_step)(case))
        if self._lowered is not None and case.kind not in ("rule", "skip"):
            expected, got = (self._run(each, case.feeds).outputs for each in (self.scaled, self._lowered))
            for name in self._lowered.outputs:
                found += compare_values(name, expected[name], got[name], PLAIN, lost=SUBNORMAL)
        return found

    def finite_gradients(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether the original computes a finite loss and finite gradients."""
        outputs = self.original.run(feeds).outputs
        return all(map(is_finite, self._gradients(outputs, *self._wholes, self.pair.analysis.loss.name or "")))

    def _gradients(self, outputs: Arrays, *others: str) -> list[np.ndarray[Any, Any]]:
        """Return the gradients of the original, and other values."""
        return [outputs[name] for name in (*self.gradients, *self.lacking, *others) if name in outputs]

    def can_run(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether the original runs on some feeds: an index that it computes may be out of range."""
        try:
            self.original.run(feeds)
        except VerifyError:
            return False
        return True

    def with_scale(self, start: Arrays, scale: float) -> Arrays:
        """Return the state with another loss scale, if it is fed to the scaled graph."""
        scale = scale if self.feeds_scale else self.oracle.initial
        return {**start, self.pair.step.scale.value.name or "": np.asarray(scale, dtype=np.float32)}

    # --- one step of both -------------------------------------------------------------------------------------------

    def _evaluate_step(self, case: Case) -> Iterator[Difference]:
        expected, got = self.original.run(case.feeds), self._run(self.scaled, case.feeds)
        gradients = self._unscaled(got)
        infinite = next((name for name, array in gradients.items() if not is_finite(array)), None)
        computes = all(is_finite(expected.outputs[name]) for name in self._wholes)
        finite, flag = infinite is None and computes, self.pair.step.all_finite
        if self._is_partial and flag is not None:  # a gradient outside of these may have overflowed
            finite &= bool(np.all(got.outputs[flag.name or ""]))
        self.compared += finite
        if not finite and computes and self._holds_scaled(case, expected):
            if infinite is not None:
                yield Difference(infinite, expected.outputs.get(infinite, np.zeros(0)), gradients[infinite], ORIGINAL)
            elif flag is not None:
                yield Difference(flag.name or "", np.asarray(True), got.outputs[flag.name or ""], ORIGINAL)
        yield from self._compare_step(case, expected, got, gradients, finite)
        yield from self._evaluate_effects(case, got, finite, gradients)
        exposed, loss = self.pair.scaled_loss, self.pair.analysis.loss.name or ""
        if exposed is not None and loss in got.outputs:
            with np.errstate(over="ignore"):
                product = got.outputs[loss].astype(np.float32) * np.float32(
                    case.feeds[self.pair.step.scale.value.name or ""]
                )
            wanted, name = product.astype(got.outputs[loss].dtype), exposed.name or ""
            yield from compare_values(name, wanted, got.outputs[name], "loss times scale", case.tolerance)

    def _compare_step(
        self, case: Case, expected: Results, got: Results, gradients: Arrays, finite: bool
    ) -> Iterator[Difference]:
        """Compare outputs, gradients and next values with those of the original."""
        loss, states = self.pair.analysis.loss.name or "", self.pair.states
        following = set(states.values())
        scale = float(np.ravel(case.feeds[self.pair.step.scale.value.name or ""])[0])
        least = max(self.lost, FLOAT32_UNDERFLOW / min(1.0, scale))
        noise = {} if self._noise is None else self._noise.measure(case, expected)
        again = functools.cache(lambda: self._run_update(case, expected, gradients))

        def compare(name: str, wanted: Any, array: Any) -> Iterator[Difference]:
            return compare_values(name, wanted, array, ORIGINAL, case.tolerance, max(least, noise.get(name, 0.0)))

        def compare_update(name: str, array: Any) -> Iterator[Difference]:
            found = list(compare(name, _result(expected, name), array))
            if found and finite and not self.lost:
                # It may be the underflow of a gradient, enlarged: the original's update of the same gradients decides.
                # Where float16 loses far more, such an update would say nothing of gradients that are small altogether.
                found = list(compare_values(name, _result(again(), name), array, ORIGINAL, case.tolerance))
            yield from found

        for name in self._shown:
            if name in got.outputs and name not in following and (finite or name == loss):
                wanted, array = expected.outputs[name], got.outputs[name]
                is_widened = wanted.dtype.itemsize < array.dtype.itemsize  # gradient_dtype
                if name in gradients or is_widened:
                    yield from compare(name, wanted.astype(array.dtype) if is_widened else wanted, array)
                else:
                    yield from compare_update(name, array)
        for name, array in gradients.items() if finite else ():
            if name in expected.outputs and name not in self._shown:
                yield from compare(name, np.asarray(expected.outputs[name]).astype(array.dtype), array)
        # A non-finite step that is applied writes its results, NaN or not.
        for name, output in states.items() if finite else ():
            yield from compare_update(output or name, self._next(name, got))

    def _holds_scaled(self, case: Case, expected: Results) -> bool:
        """Return whether the original's gradients times the scale, and their terms, are far within float32's range."""
        if self.pair.small or float(np.ravel(case.feeds[self.pair.step.scale.value.name or ""])[0]) > MODEST_SCALE:
            return False
        arrays = (np.asarray(array, np.float64) for array in self._gradients(expected.outputs))
        return all(np.abs(array).max(initial=0.0) < MODEST for array in arrays)

    def _evaluate_poison(self, case: Case) -> Iterator[Difference]:
        """Compare a step with inputs that are not finite.

        The gradients of both graphs decide whether it is applied. Where these are finite, and another result of the
        original is not, the file may check that, too. In any case states stay finite, but for the original's own doing.
        """
        assert self.pair.step.all_finite is not None
        expected, got = self.original.run(case.feeds), self._run(self.scaled, case.feeds)
        gradients, name = self._unscaled(got), self.pair.step.all_finite.name or ""
        finite = all(map(is_finite, (*gradients.values(), *self._gradients(expected.outputs, *self._wholes))))
        results = (*expected.outputs.values(), *(expected.left[s] for s, o in self.pair.states.items() if o is None))
        if finite and not all(map(is_finite, results)):
            finite = bool(np.all(got.outputs[name]))
        elif finite != bool(np.all(got.outputs[name])):
            why = "all values of the original are finite" if finite else "a gradient is not finite"
            yield Difference(name, np.asarray(finite), got.outputs[name], why)
        yield from self._find_infected(case, got, lambda: expected.outputs)
        yield from self._compare_step(case, expected, got, gradients, finite)
        yield from self._evaluate_effects(case, got, finite, gradients)

    def find_infected(self, case: Case) -> list[Difference]:
        """Find the states that a number of the batch makes non-finite, and not the original itself.

        Random numbers need not be the same in both graphs.
        """
        got = self.scaled.run(case.feeds)
        return [*self._find_infected(case, got, lambda: self.original.run(case.feeds).outputs)]

    def _find_infected(self, case: Case, got: Results, run: Callable[[], Arrays]) -> Iterator[Difference]:
        if not self.oracle.applies(case.feeds, False):
            yield from self.finite_states.find_infected(case.feeds, lambda state: self._next(state, got), run)

    def _evaluate_effects(self, case: Case, got: Results, finite: bool, gradients: Arrays) -> Iterator[Difference]:
        """Compare the state of a skipped step, the state of the loss scale, and telemetry."""
        kept = self.pair.states.keys() if self.oracle.applies(case.feeds, finite) else self.pair.kept
        for name in case.feeds.keys() & self.pair.states.keys() - kept:
            yield from compare_values(name, np.asarray(case.feeds[name]), self._next(name, got), OLD, None)
        for name, value in self.oracle.after(case.feeds, finite).items():
            yield from compare_values(f"{name}.next", value, self._next(name, got), RULE, None)
        for name, value in self.oracle.ranges(case.feeds, gradients).items():
            yield from compare_values(f"{name}.next", value, self._next(name, got), TELEMETRY, 1e-6)
        values = {**case.feeds, **got.outputs}
        for name, value in self.oracle.telemetry(case.feeds, finite, gradients, values):
            yield from compare_values(name, value, got.outputs[name], TELEMETRY, 1e-6)

    def _unscaled(self, got: Results) -> Arrays:
        return {name: got.outputs[shown] for name, shown in self._quotients.items() if shown in got.outputs}

    def _next(self, state: str, got: Results) -> np.ndarray[Any, Any] | None:
        """Return the next value of a state, None for a missing one, which the proof has reported."""
        output = self.pair.following.get(state)
        return got.left.get(state) if output is None else got.outputs.get(output)

    def _run_update(self, case: Case, expected: Results, gradients: Arrays) -> Results:
        """Run the original on a scaled graph's unscaled gradients, in place of its own, as far as these are known."""
        runner, cuts = self._cut
        given = {cut: expected.outputs[name] for name, cut in cuts.items()}
        for name, array in gradients.items():
            if name in cuts and array.dtype == given[cuts[name]].dtype:
                given[cuts[name]] = array
        return self._run(runner, {**case.feeds, **given})

    @functools.cached_property
    def _cut(self) -> tuple[Runner, dict[str, str]]:
        copy = Copy(self.pair.original, self.pair.states, self._own_seeds)
        cuts = {name: copy.cut(name)[0] for name in self._raw}
        runner = self._make_runner(copy.model, "the original with given gradients")
        self._originals.append(runner)
        return runner, cuts

    # --- a non-finite gradient ------------------------------------------------------------------------------

    def gradients_on(self, feeds: Mapping[str, Any]) -> Arrays:
        """Return the gradients of the original on some feeds, or on others of the same shapes."""
        key = tuple(np.shape(array) for array in feeds.values())
        if key not in self._known:
            outputs = self.original.run(feeds).outputs
            self._known[key] = {name: outputs[name] for name in self.gradients}
        return self._known[key]

    def _evaluate_skip(self, case: Case) -> Iterator[Difference]:
        runner, cuts = self._forced
        assert case.gradient is not None and case.position is not None and case.number is not None
        gradients = self.gradients_on(case.feeds)
        given = {name: gradients[name].astype(dtype) for name, (_, dtype) in cuts.items()}
        for name in (case.gradient, *case.others):
            given[name].reshape(-1)[min(case.position, given[name].size - 1)] = case.number
        got = runner.run({**case.feeds, **{cut: given[name] for name, (cut, _) in cuts.items()}})
        yield from self._evaluate_effects(case, got, False, self._unscaled(got))

    @functools.cached_property
    def _forced(self) -> tuple[Runner, dict[str, tuple[str, Any]]]:
        copy = self._scaled_copy()
        cuts = {name: copy.cut(raw) for name, raw in self._raw.items()}
        return self._make_runner(copy.model, "the scaled graph with given gradients"), cuts

    # --- the rule by itself -----------------------------------------------------------------------------------------

    def _evaluate_rule(self, case: Case) -> Iterator[Difference]:
        runner, given, names = self._rule
        got = runner.run({**case.feeds, **dict.fromkeys(given, np.asarray(case.finite))}).outputs
        for role, value in self.oracle.rule_alone(case.feeds, case.finite).items():
            if role in names:  # otherwise it has no next value, which the proof has reported
                yield from compare_values(names[role], value, got[names[role]], RULE, None)

    @functools.cached_property
    def _rule(self) -> tuple[Runner, list[str], dict[ScaledValue, str]]:
        step, scale = self.pair.step, self.pair.step.scale
        given = [*dict.fromkeys(flag for flag in (step.all_finite, step.guard) if flag is not None)]
        nexts = {role: skip_ordering(value) for role, value in scale.next.items()}
        nexts |= {} if scale.stuck is None else {ScaledValue.STUCK: scale.stuck}
        if not nexts:
            raise VerifyError("the metadata of the scaled graph name no next value of the loss scale")
        rule = extract(step.model, [*nexts.values()], given)
        names = {role: value.name or "" for role, value in nexts.items()}
        runner, flags = self._make_runner(rule, "the update rule"), [flag.name or "" for flag in given]
        others = runner.required.difference(flags, (value.name for value in scale.states.values()))
        if others:
            raise VerifyError(f"the update rule reads the input {min(others)!r}")
        return runner, flags, names

    # --- preparation ------------------------------------------------------------------------------------------------

    def _copy(self, model: ir.Model) -> Copy:
        """Return a copy with the scale and the states as inputs, and seeds for its random operators."""
        scale = [self.pair.step.scale.value.name or ""] if self.feeds_scale else []
        return Copy(model, [*scale, *self.pair.states], self._seeds)

    def _scaled_copy(self) -> Copy:
        copy = self._copy(self.pair.step.model)
        if not self._on_gpu:
            self.replaced = copy.spell_out_finite_checks()
        inputs = {value.name for value in copy.graph.inputs}
        copy.show([*self._quotients.values(), *(name for name in self.oracle.activations if name not in inputs)])
        return copy

    def repeats(self, feeds: Arrays) -> bool:
        """Return whether the original repeats its values, if need be in sessions of their own.

        In a new session, random operators start from their seeds.
        """
        if self.seeds is None or self._repeats(feeds):
            return self.seeds is not None
        self.original.fresh = True
        return self._repeats(feeds)

    def _repeats(self, feeds: Arrays) -> bool:
        one, other = self.original.run(feeds).outputs, self.original.run(feeds).outputs
        return all(same_bits(array, other[name]) for name, array in one.items())

    def _find_random(self) -> tuple[int | None, dict[str, int], dict[str, int]]:
        """Choose seeds for random operators without one, in both graphs; return their number, None if impossible."""
        graph, pair = self.pair.original.graph, self.pair
        named = {(node.outputs[0].name, node.op_type): node for node in pair.step.graph if node.outputs}
        others = {
            node: pair.nodes.get(node) or named.get((node.outputs[0].name, node.op_type))
            for node in find_unseeded(graph)
        }
        seeds = {node.outputs[0]: (other, i) for i, (node, other) in enumerate(others.items(), 1) if other is not None}
        mine = {value.name or "": i for value, (_, i) in seeds.items()}
        theirs = {other.outputs[0].name or "": i for other, i in seeds.values()}
        everywhere = list(find_unseeded(graph.all_nodes()))
        return len(mine) if len(mine) == len(everywhere) else None, mine, theirs


def _result(results: Results, name: str) -> np.ndarray[Any, Any]:
    """Return the value of an output, or the one that a step left in a state."""
    return results.outputs[name] if name in results.outputs else results.left[name]
