"""The table of quantizers in docs/elsewhere.md is what tests/frameworks/quantizers.py measured."""

import re

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as CONFIGS
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tests import noxfile
from tests.frameworks.quantizers import (
    METHODS,
    NOT_RUN,
    NUM_QUESTIONS,
    PACKAGES,
    PAGE,
    PREQUANTIZED,
    RESULTS,
    outcome,
    table,
)
from tests.tables import on_page, read_rows


def test_the_page_has_the_rows_of_the_file_which_are_those_of_methods():
    page, rows = PAGE.read_text("utf-8"), read_rows(RESULTS)
    assert page == on_page(page, RESULTS, table(rows)), "tests.frameworks.quantizers --page"
    methods = [(method.package, method.call) for method in METHODS]
    assert len({*methods}) == len(methods)
    assert {(row["quantizer"], row["code"]) for row in rows} == {*methods}
    assert [*noxfile.QUANTIZERS] == PACKAGES


def test_every_quantizer_of_transformers_has_a_method_or_a_reason():
    calls = " ".join(method.call for method in METHODS)
    tried = {*re.findall(r"\w+Config", calls)}
    others = {name for name, kind in CONFIGS.items() if kind.__name__ not in tried}
    # These two quantize by functions of their own.
    others -= {"auto-round", "compressed-tensors"}
    assert others <= PREQUANTIZED | NOT_RUN
    assert all(AUTO_QUANTIZER_MAPPING[name].requires_calibration for name in PREQUANTIZED & others)
    page = PAGE.read_text("utf-8").lower()
    assert [name for name in PREQUANTIZED | NOT_RUN if name not in page] == []


def test_an_outcome_is_about_the_images_and_the_saved_folder():
    row = {"right": NUM_QUESTIONS, "swapped": 0, "reloaded": "same", "note": ""}
    assert outcome(row) == "works"
    assert outcome(row | {"right": NUM_QUESTIONS // 2}) == "runs, and loses answers"
    # The answers of images that the model does not look at stay right for others.
    assert outcome(row | {"swapped": NUM_QUESTIONS}) == "runs, and loses answers"
    assert outcome(row | {"reloaded": "other answers"}) == "works; not reloaded: other answers"
    assert outcome({"error": "E: no GPU", "note": "n"}) == "does not run: E: no GPU; n"
