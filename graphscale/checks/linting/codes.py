"""The codes of lint as data: title, severity, reason and fix of each.

The documentation's index, the command line and the SARIF output derive from this table.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from graphscale.errors import DOCS_URL

__all__ = ["CODES", "GROUPS", "Code", "Severity"]

Severity = Literal["error", "warning", "note"]

# The first digit of a code.
GROUPS = {
    "1": "Where the scale enters",
    "2": "Where it comes out",
    "3": "The finite check",
    "4": "The guards of carried state",
    "5": "State of the graph",
    "6": "Precision",
}


@dataclasses.dataclass(frozen=True)
class Code:
    """One kind of finding.

    Attributes:
        code: its stable name, `GS` and three digits.
        name: a short name in kebab case.
        severity: error: the step computes something wrong, or can destroy the state; warning: it loses precision or
            protection, or does so under some condition; note: worth knowing.
        title: the defect in a few words.
        why: the reason why it matters.
        fix: the repair.
    """

    code: str
    name: str
    severity: Severity
    title: str
    why: str
    fix: str

    @property
    def page(self) -> str:
        """The page of the code, relative to the documentation's root."""
        return f"lint/{self.code}.md"

    @property
    def url(self) -> str:
        """The address of the code's page."""
        return f"{DOCS_URL}lint/{self.code}/"


# A block for each code: its number, severity, name and title; then why it matters; then the fix.
_TABLE = """\
GS101 error unscaled-branch: A sum of a scaled and an unscaled share of a gradient
A share that misses the loss scale is divided by it all the same, and so all but vanishes from the gradient.
Multiply that share by the loss scale as well: every loss that is differentiated has to be scaled.

GS102 warning unprotected-gradient: A part of the backward pass runs without the loss scale
Gradients computed without the scale underflow in float16 as if there were no loss scale.
Let the scale enter where the backward pass begins, at the gradient of the loss.

GS103 error scaled-twice: A gradient is multiplied by the loss scale twice
One division leaves a factor of the loss scale in the gradient: steps of the wrong size by orders of magnitude, which \
change with the scale.
Multiply once, where the backward pass begins.

GS104 error scale-leaks: The loss scale enters something that is no gradient
A constant or a value that the forward pass, or the derivative of an activation, reads as well is changed for that \
reader too, so that the result depends on the scale.
Multiply on the edge of the one reader that begins the backward pass, not the value that others share.

GS105 warning scaled-loss-output: The loss leaves the graph multiplied by the loss scale
Logs, schedules and early stopping see a number that jumps whenever the scale changes.
Give out the loss itself; if the scaled one is wanted too, name it scaled_loss.

GS106 warning float16-without-scale: Gradients are computed in float16 without a loss scale
Gradients below 6e-8 become zero in float16, and those below 6e-5 lose digits: training stalls silently.
Scale the graph: graphscale scale MODEL -o OUT.

GS107 error bad-scale-value: The loss scale begins with a value that cannot work
A scale of zero, infinity or NaN makes every gradient NaN or zero; one below 1 makes underflow worse. Beyond 2**40 \
every number of float16 overflows, and no policy leads to a scale outside of its range.
Begin with a power of two such as 32768.

GS201 error gradient-not-unscaled: A gradient leaves, or updates state, still multiplied by the loss scale
The optimizer takes steps that are too large by the loss scale, thousands of times, and weight decay or moments mix \
with numbers of another magnitude.
Divide the gradient by the loss scale before its first use by the optimizer, or before it leaves the graph.

GS202 error unscaled-twice: A gradient is divided by the loss scale twice
The gradient is too small by the loss scale: training stands still.
Divide once.

GS203 error unscaled-without-scale: A value is divided by the loss scale that was never multiplied by it
The gradient is too small by the loss scale, and has underflowed in float16 as if there were none.
Let the loss scale enter this branch of the backward pass too, or do not divide.

GS204 error unscaled-by-another-value: A gradient is divided by another scale than it was multiplied by
On each step that changes the loss scale the gradient is wrong by the factor of the change.
Divide by the value that was multiplied, the scale of this step, not the one of the next.

GS205 error nonlinear-before-unscaling: A gradient is clipped, compared or bent while it is still scaled
A threshold that is meant for gradients meets gradients times thousands: everything is clipped, and how much depends \
on the scale.
Unscale first, then clip; or multiply the threshold by the loss scale.

GS206 warning unknown-operator: A scaled value enters an operator whose effect on it is not known
It is unknown whether the scale comes out again behind it.
Unscale before the operator, or replace it by operators of ai.onnx or com.microsoft.

GS301 error check-misses-gradient: A gradient is not part of the finite check
If that gradient alone overflows, the step is applied, and infinity or NaN gets into the weights for good.
Test every unscaled gradient.

GS302 error check-loses-nan: The finite check does not see NaN
ReduceMax and ReduceMin pass over a NaN that is not their first element, and every comparison with NaN is false: a NaN \
gets into the weights.
Use IsNaN on the gradient itself, or multiply by 0, sum up and test the sum with IsNaN.

GS303 error check-loses-infinity: The finite check does not see infinity
An overflow gives infinity first: the step is applied with it, and the weights are lost.
Test with IsInf too, or multiply by 0 before the sum, which makes NaN of infinity.

GS304 error no-check: The loss scale adjusts itself, or steps are skipped, without a finite check of the gradients
A scale that grows until it overflows has to see the overflow, or the first one destroys the weights.
Test all unscaled gradients for NaN and infinity, and let the scale and all carried state depend on the test.

GS305 error scale-ignores-check: The next loss scale does not follow the finite check
After an overflow the scale stays where it is, so that every following step overflows and is skipped.
Lower the scale where the check fails, and only there.

GS306 error hidden-overflow: NaN or infinity in a gradient becomes finite before the finite check
The step is applied with a number that no gradient has, the scale never falls, and from then on each overflow goes the \
same way.
Test the gradient before it is clipped, saturated by a cast or a quantization, or freed of NaN.

GS401 error update-not-guarded: Carried state changes on a step that is to be skipped
A step with a gradient that is not finite writes NaN or infinity into a weight or a moment, or lets it drift from the \
others.
Select the old value where the finite check fails: Where(all_finite, new, old).

GS402 error guarded-by-something-else: Carried state is selected by something else than the finite check
A step that the check rejects is applied to this state.
Select by the finite check of all gradients.

GS403 error guard-swapped: The branches of a guard are swapped
Good steps are dropped, and bad ones applied.
Swap the branches, or negate the condition.

GS404 error counter-advances: A step counter advances on a skipped step
Bias correction and learning-rate schedules run ahead of the steps that were really taken.
Guard the counter like the weights.

GS405 error guard-by-product: An update is switched off by multiplying it by zero
Zero times infinity is NaN, and so is zero times NaN: exactly on the step to be skipped the state is lost.
Select with Where instead of multiplying.

GS406 warning update-signal-ignored: An optimizer operator is to skip by an input that its CPU kernel ignores
ONNX Runtime's CPU kernel of AdamOptimizer takes the step whatever update_signal says, and does not divide by its \
input loss_scale.
Select its outputs with Where and give it copies of its states, or use AdamWOptimizer.

GS407 warning unexplained-state: State is carried that neither the metadata nor the roles have
Nothing guards it on a skipped step, or nothing feeds it back: sessions, checkpoints and verify do not know that it is \
state.
Add it to the original graph, and scale that again: graphscale inspect MODEL shows what is carried there.

GS501 error foldable-state: State is an initializer that is no graph input
Runtimes treat such an initializer as a constant, and fold expressions over it at load time: they keep their first \
value forever.
List the initializer among the graph's inputs as well: it still needs no feed.

GS502 error write-after-read: State may be overwritten before it is read
ONNX Runtime does not order an in-place write after other readers of the old value: a reader may see the state of the \
next step.
Make the written value depend on every reader of the old one.

GS503 error metadata-mismatch: The metadata of the loss scale do not fit the graph
Sessions find the state by these names: they refuse the file, or lose the state between steps.
Scale the original graph again.

GS504 error count-out-of-range: A count of the loss scale begins outside of its range
The scale grows much too late, or never; or it falls at the first step that is not finite, or long after; telemetry \
reports nonsense.
Begin with the counts of the policy: scale the original graph again.

GS505 warning other-beginning: The loss scale does not begin as its policy does
The first steps run with another scale, and up to another growth, than the policy in the metadata says: someone has \
changed a stored number.
Scale the original graph again with the policy that is wanted. If the file is to go on with a run, ignore this code.

GS506 note half-of-a-step: This is a half of a split step
Mistakes that only both halves show together are not found: a gradient that one half returns scaled and the other \
reads as unscaled, a value that neither half has.
Lint the step before it is split, and compare the halves with it: graphscale verify STEP GRADS UPDATE.

GS601 warning scale-cast-to-float16: The loss scale is cast to float16
Float16 ends at 65504: a scale of 65536 becomes infinity there, although its product with a gradient would fit.
Multiply in float32, then cast the product to float16.

GS602 warning float16-accumulation: Gradients are added up in float16
Unscaled gradients underflow in float16, and a small addend is lost beside a large sum.
Unscale and accumulate in float32.

GS603 warning float16-unscale: A gradient is unscaled in float16
The quotient underflows: what the loss scale saved from becoming zero becomes zero here.
Cast the gradient to float32 first, then divide.

GS604 warning float16-scale: The loss scale itself is kept in float16
It cannot grow beyond 65504, and a factor that is no power of two is rounded each time.
Keep the loss scale in float32.

GS605 warning small-float-counter: Steps are counted in float16 or bfloat16
Float16 counts to 2048 and bfloat16 to 256, where adding 1 changes nothing: a growth period beyond that is never \
reached.
Count in int64, or in float32, which is exact to 2**24.

GS606 note bfloat16-with-scale: A bfloat16 graph has a loss scale
Bfloat16 has the range of float32, so that gradients do not underflow: the scale does no harm, and is not needed.
Train without a loss scale, or with float16.

GS607 warning float16-state: Weights or moments are carried in float16 or bfloat16
An update below half a unit in the last place is lost: at 1.0 that is all below 0.0005 in float16 and 0.004 in \
bfloat16. Second moments underflow.
Carry float32 master weights and moments, and cast for the forward pass.

GS608 warning float16-gradient-output: An unscaled gradient leaves the graph in float16
Numbers that the loss scale saved from becoming zero become zero on the way out: all below 6e-8.
Give out float32: graphscale scale MODEL -o OUT --gradient-dtype float32.
"""


def _parse(block: str) -> Code:
    head, why, fix = block.splitlines()
    names, title = head.split(": ", 1)
    code, severity, name = names.split()
    return Code(code, name, cast(Severity, severity), title, why, fix)


CODES: dict[str, Code] = {code.code: code for code in map(_parse, _TABLE.split("\n\n"))}
