"""Verdicts on the outputs of the published code and ours: whether they agree, and who is wrong."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .worker import POSITION_KINDS, ROPE_KINDS, ROPE_PAIRS, SHARED_IDS

Verdict = Literal["same", "undecided", "the original is wrong", "DIFFERENT", "OURS IS WRONG"]
SAME: Final = "same"
UNDECIDED: Final = "undecided"
ORIGINAL_WRONG: Final = "the original is wrong"
DIFFERENT: Final = "DIFFERENT"
OURS_WRONG: Final = "OURS IS WRONG"
# Names of the cases that inputs.py writes.
PADDED_CASE, SWAPPED_CASE = "batch", "swapped"
SINGLE_CASES = ("image", "other image")
BATCH_CASES = (PADDED_CASE, SWAPPED_CASE, *SINGLE_CASES)
# Tolerances for logits (largest difference), losses, and gradients (norm of the difference,
# relative to the norm). In fp32 the two models add in different orders: differences of 3e-5 were
# measured (docs/numerics.md). In bf16 the published code's own logits are off by up to 0.25, and it
# rounds the loss to bf16.
COMPARE_TOLERANCES = {"fp32": (1e-3, 1e-4, 1e-3), "bf16": (0.5, 0.05, 0.15)}
MeasuredPair = tuple[str, str, float]  # both values as text, and their difference


@dataclass(frozen=True)
class Comparison:
    """One line of the report.

    Args:
        sample: The sample or batch.
        quantity: Which of its outputs is compared.
        original, ours: The values of both models, as text.
        verdict: Whether the values agree.
        note: The reason for the verdict, if it needs one.
    """

    sample: str
    quantity: str
    original: str
    ours: str
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of one model, as its worker wrote them.

    Args:
        results: For each case, the loss, the answer's tokens and the errors.
        tensors: Logits and gradients, named ``case/name``.
    """

    results: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor]

    def error(self, case: str, name: str) -> str | None:
        """Return the error with which a result of a case ended, or ``None``."""
        result = self.results[case].get(name)
        return result["error"] if isinstance(result, dict) else None

    def gradients(self, case: str) -> dict[str, Tensor]:
        """Return the gradients of a case by the names of their weights."""
        prefix = f"{case}/gradient/"
        return {k[len(prefix) :]: t for k, t in self.tensors.items() if k.startswith(prefix)}


def compare_outputs(
    original: ModelOutputs, ours: ModelOutputs, supervised: Mapping[str, int], precision: str
) -> list[Comparison]:
    """Compare all outputs of the two models.

    Args:
        supervised: Number of supervised tokens of each case. The loss of a batch is the mean of its
            samples' losses, weighted by these numbers.
        precision: Key of ``COMPARE_TOLERANCES``.
    """
    pair = _OutputPair(original, ours, supervised, *COMPARE_TOLERANCES[precision])
    comparisons = [*pair.compare_sample("text"), *pair.compare_sample("image")]
    comparisons += [*pair.find_rotation_and_positions(), *pair.compare_padded_batch()]
    comparisons.append(pair.compare_answers("prompt text", "text"))
    comparisons.append(pair.compare_answers("prompt image", "image"))
    return comparisons


@dataclass(frozen=True)
class _OutputPair:
    """The outputs of both models. Each public method compares some of them."""

    original: ModelOutputs
    ours: ModelOutputs
    supervised: Mapping[str, int]
    logits_tolerance: float
    loss_tolerance: float
    gradient_tolerance: float

    @property
    def models(self) -> tuple[ModelOutputs, ModelOutputs]:
        return self.original, self.ours

    def compare_sample(self, case: str) -> Iterator[Comparison]:
        """Compare logits, loss and gradients of a sample by itself."""
        for quantity, result, measure, tolerance in (
            ("logits", "logits", _compare_logits, self.logits_tolerance),
            ("loss", "loss", _compare_losses, self.loss_tolerance),
            ("gradients", "loss", _compare_gradients, self.gradient_tolerance),
        ):
            if failure := self._failure(case, result, case, quantity):
                yield failure
                continue
            theirs, ours, difference = measure(*self.models, case)
            # A comparison with NaN is false, so NaN is DIFFERENT.
            verdict: Verdict = SAME if difference <= tolerance else DIFFERENT
            note = f"difference {difference:.2g}, tolerance {tolerance:g}"
            yield Comparison(case, quantity, theirs, ours, verdict, note)

    def find_rotation_and_positions(self) -> Iterator[Comparison]:
        """Find which rotary embedding and which image positions the original has.

        They are those with which our logits are nearest to the original's. The rotary embedding is
        found first, with a sample without an image.
        """
        if any(m.error(case, "logits") for m in self.models for case in ("text", "image")):
            return
        ours = self.ours.results["text"]["rotation"]
        differences = {n: self._logits_difference("text", n, SHARED_IDS) for n in ROPE_KINDS}
        cure = f"set original_rope in config.json to {'false' if ours == ROPE_PAIRS else 'true'}"
        yield self._nearest("text", "rotation", ours, differences, cure)
        nearest = min(differences, key=lambda name: differences[name])
        differences = {n: self._logits_difference("image", nearest, n) for n in POSITION_KINDS}
        cure = "this package cannot compute it: do not train or serve this model with it"
        yield self._nearest("image", "image positions", SHARED_IDS, differences, cure)

    def _logits_difference(self, case: str, rotation: str, positions: str) -> float:
        ours = self.ours.tensors[f"{case}, {rotation}, {positions}/logits"]
        difference = (self.original.tensors[f"{case}/logits"] - ours).abs().max().item()
        return math.inf if math.isnan(difference) else difference

    def _nearest(
        self, case: str, quantity: str, ours: str, differences: Mapping[str, float], cure: str
    ) -> Comparison:
        """Compare our choice with the choice whose logits are nearest to the original's.

        Args:
            ours: The choice of our model.
            differences: The largest difference of logits with each of the two choices.
        """
        near, far = sorted(differences, key=lambda name: differences[name])
        texts = [f"{value:.2g} with {name}" for name, value in differences.items()]
        note = f"logits differ by {' and by '.join(texts)}"
        if differences[near] > self.logits_tolerance:
            return Comparison(case, quantity, "neither", ours, DIFFERENT, note)
        if differences[far] <= 2 * differences[near]:  # rounding may differ as much
            note += "; this is too close to tell: use --precision fp32"
            return Comparison(case, quantity, "either", ours, UNDECIDED, note)
        if near == ours:
            return Comparison(case, quantity, near, ours, SAME, note)
        return Comparison(case, quantity, near, ours, DIFFERENT, f"{note}; {cure}")

    def compare_padded_batch(self) -> Iterator[Comparison]:
        """Compare, for each model, samples in a padded batch with the same samples alone."""
        note = "the result of a sample changes if its batch also has a longer sample"
        for name, measure, tolerance in (
            ("logits", self._batch_logits_difference, self.logits_tolerance),
            ("loss", self._batch_loss_difference, self.loss_tolerance),
        ):
            quantity = f"{name}, difference from samples alone"
            yield self._judge(quantity, "{:.2g}", measure, note, above=-1, at_most=tolerance)
        if any(model.error(PADDED_CASE, "loss") for model in self.models):
            return
        note = "the code silently loses the images of padded samples, or a loss is not finite"
        yield self._judge("loss, change by other images", "{:.5f}", _change_by_images, note)
        note = "all gradients of the vision tower are 0, or one is NaN"
        yield self._judge("vision tower's gradients", "{} weights", _count_tower_gradients, note)

    def _judge(
        self,
        quantity: str,
        template: str,
        measure: Callable[[ModelOutputs], float],
        note: str,
        above: float = 0,
        at_most: float = sys.float_info.max,
    ) -> Comparison:
        """Judge a value of the padded batch for each model: valid is ``above < value <= at_most``.

        Args:
            quantity: Name of the value. Its part before a comma is the result (such as "loss")
                whose errors are reported.
            template: Format of the value.
            measure: Computes the value from a model's outputs.
            note: The reason for the verdict if the value is not valid.
        """
        texts, valid, notes = [], [], []
        for model in self.models:
            result = quantity.partition(",")[0]
            errors = [model.error(case, result) for case in BATCH_CASES]
            message = next(filter(None, errors), None)
            value = math.inf if message else measure(model)
            texts.append("fails" if message else template.format(value))
            valid.append(above < value <= at_most)  # False for NaN, too
            notes.append(message or note)
        verdict: Verdict = SAME if all(valid) else ORIGINAL_WRONG if valid[1] else OURS_WRONG
        reason = "" if verdict == SAME else notes[verdict == OURS_WRONG]
        return Comparison("padded batch", quantity, texts[0], texts[1], verdict, reason)

    def _batch_logits_difference(self, model: ModelOutputs) -> float:
        alone = [model.tensors[f"{case}/logits"][0] for case in SINGLE_CASES]
        batch = model.tensors[f"{PADDED_CASE}/logits"]
        return max_or_nan((a - b).abs().max().item() for a, b in zip(alone, batch, strict=True))

    def _batch_loss_difference(self, model: ModelOutputs) -> float:
        """Return the difference of the batch's loss from the mean over all supervised tokens."""
        counts = [self.supervised[case] for case in SINGLE_CASES]
        batch, _, *losses = (model.results[case]["loss"] for case in BATCH_CASES)
        total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
        return abs(batch - total / sum(counts))

    def compare_answers(self, case: str, sample: str) -> Comparison:
        """Compare the greedy tokens of a case; ``sample`` names it in the report."""
        quantity = "answer (greedy tokens)"
        if failure := self._failure(case, "answer", sample, quantity):
            return failure
        theirs, ours = (model.results[case]["answer"] for model in self.models)
        texts, note = [_first_tokens(ids) for ids in (theirs, ours)], ""
        if error := self.original.error(case, "generate"):
            note = f"the original's generate fails ({error}); it was decoded without a cache"
        verdict: Verdict = SAME if theirs == ours else DIFFERENT
        logits = [model.tensors.get(f"{case}/logits") for model in self.models]
        if not all(tensor.isfinite().all() for tensor in logits if tensor is not None):
            verdict, note = DIFFERENT, "logits are NaN or infinite: these tokens are no answer"
        return Comparison(sample, quantity, texts[0], texts[1], verdict, note)

    def _failure(self, case: str, result: str, sample: str, quantity: str) -> Comparison | None:
        """Return a line of the report if a model failed to compute the result, else ``None``."""
        theirs, ours = (model.error(case, result) for model in self.models)
        if ours is not None:
            return Comparison(sample, quantity, "fails" * bool(theirs), "fails", OURS_WRONG, ours)
        if theirs is None:
            return None
        value = f"{self.ours.results[case]['loss']:.5f}" if quantity == "loss" else "computes it"
        return Comparison(sample, quantity, "fails", value, ORIGINAL_WRONG, theirs)


def _compare_logits(first: ModelOutputs, second: ModelOutputs, case: str) -> MeasuredPair:
    logits = [model.tensors[f"{case}/logits"] for model in (first, second)]
    spans = [f"{x.min().item():.2f} to {x.max().item():.2f}" for x in logits]
    return spans[0], spans[1], (logits[0] - logits[1]).abs().max().item()


def _compare_losses(first: ModelOutputs, second: ModelOutputs, case: str) -> MeasuredPair:
    theirs, mine = first.results[case]["loss"], second.results[case]["loss"]
    return f"{theirs:.5f}", f"{mine:.5f}", abs(theirs - mine)


def _compare_gradients(first: ModelOutputs, second: ModelOutputs, case: str) -> MeasuredPair:
    theirs, mine = first.gradients(case), second.gradients(case)
    error = math.inf
    if theirs.keys() == mine.keys():
        error = max_or_nan(
            ((theirs[n] - mine[n]).norm() / theirs[n].norm().clamp_min(1e-12)).item()
            for n in theirs
        )
    return f"{len(theirs)} weights", f"{len(mine)} weights", error


def _change_by_images(model: ModelOutputs) -> float:
    """Return how much the padded batch's loss changes when its images are swapped."""
    return abs(model.results[PADDED_CASE]["loss"] - model.results[SWAPPED_CASE]["loss"])


def _count_tower_gradients(model: ModelOutputs) -> int:
    """Return how many of the vision tower's gradients are finite and not 0."""
    return sum(
        ".vision." in name and bool(gradient.any() and gradient.isfinite().all())
        for name, gradient in model.gradients(PADDED_CASE).items()
    )


def max_or_nan(numbers: Iterable[float]) -> float:
    """Return the maximum, or NaN if a number is NaN; Python's ``max`` may ignore NaN."""
    return torch.tensor([*numbers], dtype=torch.float64).max().item()


def _first_tokens(ids: list[int]) -> str:
    return " ".join(map(str, ids[:4])) + (" ..." if len(ids) > 4 else "")


def format_comparisons(comparisons: list[Comparison]) -> str:
    """Format comparisons as a text table, with each note on a line below its row."""
    header = ("sample", "quantity", "original", "ours", "verdict")
    cells = [header, *((x.sample, x.quantity, x.original, x.ours, x.verdict) for x in comparisons)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    text = []
    for row, note in zip(cells, ["", *(item.note for item in comparisons)], strict=True):
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        text.append("  ".join(padded).rstrip())
        if note:
            text.append(f"{'':<{widths[0]}}    {note}")
    return "\n".join(text)
