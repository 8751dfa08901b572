"""Whether ``draw_ahead`` and transformers' loop draw the same tokens, and each the same twice.

``python docs/benchmarks/compare_loops.py --out FILE`` does so with random weights of the real size
on a GPU, and elsewhere with those of a small model: ``--device cpu --config FILE``.

A row for every batch, and for steps that are compiled and not. Four greedy answers are generated:
``theirs 1``, ``theirs 2`` by transformers' loop, ``ours 1``, ``ours 2`` by ours. Columns:

- ``same_tokens``: of every two answers. If the two of a loop differ, the device computes one thing
  in several ways, and other differences say nothing about the loops.
- ``first_differences``: of every two answers that differ, in each row that does: ``row``, ``step``
  (0 is the first token drawn) and both ``tokens``.
- ``distinct_tokens``: of ``theirs 1``, in each row: one token for ever shows little.
- ``seconds``: of each answer.
- ``with_scores``: of one more answer of each loop, for which the scores that tokens are chosen by
  are kept: ``theirs_as_before`` and ``ours_as_before`` (the tokens are those of answer 1),
  ``same_tokens``, ``first_step_scores_differ`` (null: never up to the first token that does) and
  ``largest_difference`` in that step; ``rows``: where a row's tokens begin to differ, the ``step``
  and for each loop its ``token``, its ``best`` and ``second`` score and the ``margin`` between
  them. ``spacing`` is how far numbers of the model's dtype lie apart there: with margins of about
  one the tokens tie; scores that differ by much more come from a fault in a loop.
"""

import argparse
import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from glm4v_patched.bench import generation_worker
from glm4v_patched.inference.decoding.loop import draw_ahead
from glm4v_patched.inference.decoding.static_cache import StaticCaches, compiling
from glm4v_patched.installed_versions import versions

LOOPS: dict[str, dict[str, Any]] = {"theirs": {}, "ours": {"custom_generate": draw_ahead}}
WAYS = ("compiled", "not compiled")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Keeps(LogitsProcessor):
    """Keeps the scores by which tokens are chosen; last of all processors."""

    # As if it were transformers' own: with anybody else's, our loop draws nothing ahead.
    __module__ = "transformers.keeps"

    def __init__(self):
        self.scores: list[Tensor] = []

    def __call__(self, input_ids, scores):
        self.scores.append(scores.clone())
        return scores


class Answers:
    """Generates greedy answers of one batch, in one of :data:`WAYS`."""

    def __init__(self, model, settings: dict, batch: int, way: str):
        self.model, self.batch, self.way = model, batch, way
        self.new, self.device = settings["new_tokens"], torch.device(settings["device"])
        self.inputs = generation_worker.prompts(model.config, settings, batch, self.device)
        self.inputs["pixel_values"] = self.inputs["pixel_values"].to(model.dtype)
        self.caches = StaticCaches(model, step=256, fullgraph=True)
        images = model.config.vision.num_image_tokens + 2
        self.positions = images + settings["prompt_tokens"] + self.new

    def of(self, loop: str, **more) -> tuple[Tensor, float]:
        """The tokens ``(B, new)``, on the CPU, and the seconds that they took."""
        given = self.caches.options(self.batch, self.positions)
        if self.way == "not compiled":
            given["disable_compile"] = True
            given.pop("compile_config", None)
        elif self.device.type != "cuda":
            config = compiling(self.batch, {"triton.cudagraphs": False}, fullgraph=True)
            config._compile_all_devices = True
            given["compile_config"] = config
        generation_worker.synchronize(self.device)
        began = time.perf_counter()
        ids = self.model.generate(
            **self.inputs, **given, **LOOPS[loop], **more, max_new_tokens=self.new,
            do_sample=False, eos_token_id=None, pad_token_id=self.model.config.pad_token_id,
        )  # fmt: skip
        generation_worker.synchronize(self.device)
        return ids[:, -self.new :].cpu(), time.perf_counter() - began


def first_differences(one: Tensor, other: Tensor) -> list[dict]:
    """Of each row that differs."""
    found = []
    for row, differs in enumerate((one != other).unbind()):
        if differs.any():
            step = int(differs.int().argmax())
            found.append(
                {"row": row, "step": step, "tokens": [int(x[row, step]) for x in (one, other)]}
            )
    return found


def compare(answers: Answers) -> dict:
    for loop in LOOPS:  # compiles, and records a CUDA graph
        answers.of(loop)
    tokens, seconds = {}, {}
    for loop in LOOPS:
        for number in (1, 2):
            name = f"{loop} {number}"
            tokens[name], seconds[name] = answers.of(loop)
    pairs = {f"{a}, {b}": (tokens[a], tokens[b]) for a, b in combinations(tokens, 2)}
    differences = {name: first_differences(*pair) for name, pair in pairs.items()}
    return {
        "same_tokens": {name: not found for name, found in differences.items()},
        "first_differences": {name: found for name, found in differences.items() if found},
        "distinct_tokens": [len(row.unique()) for row in tokens["theirs 1"]],
        "seconds": seconds,
        "with_scores": compare_scores(answers, tokens),
    }


def compare_scores(answers: Answers, before: dict[str, Tensor]) -> dict:
    tokens, scores = {}, {}
    for loop in LOOPS:
        keeps = Keeps()
        tokens[loop], _ = answers.of(loop, logits_processor=[keeps])
        scores[loop] = keeps.scores
    found = first_differences(*tokens.values())
    last = min((each["step"] for each in found), default=answers.new - 1)
    apart = [
        float((a - b).nan_to_num(0, posinf=0, neginf=0).abs().max())
        for a, b in zip(*(kept[: last + 1] for kept in scores.values()), strict=True)
    ]
    differs = next((step for step, largest in enumerate(apart) if largest), None)
    return {
        **{f"{loop}_as_before": torch.equal(tokens[loop], before[f"{loop} 1"]) for loop in LOOPS},
        "same_tokens": not found,
        "first_step_scores_differ": differs,
        "largest_difference": None if differs is None else apart[differs],
        "rows": [described(each, tokens, scores, answers.model.dtype) for each in found],
    }


def described(found: dict, tokens: dict, scores: dict, dtype: torch.dtype) -> dict:
    row, step = found["row"], found["step"]
    told: dict = {"row": row, "step": step}
    for loop in LOOPS:
        best, second = scores[loop][step][row].topk(2).values.tolist()
        told[loop] = {"token": int(tokens[loop][row, step]), "best": best, "second": second}
        told[loop]["margin"] = best - second
    exponent = torch.tensor(abs(told["theirs"]["best"])).log2().floor()
    return told | {"spacing": float(torch.finfo(dtype).eps * 2**exponent)}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file of the rows")
    add("--config", help="of a smaller model")
    add("--device", default="cuda")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--new-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=40)
    add("--ways", choices=WAYS, nargs="+", help="by default both on a GPU, else compiled")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.config is None:
        parser.error("--device cpu with the real model: give the --config of a small one")
    settings = {name: getattr(options, name) for name in ("config", "device")}
    settings |= {name: getattr(options, name) for name in ("new_tokens", "prompt_tokens")}
    settings |= {"attn_implementation": "sdpa", "against": None}
    settings |= {"weights": None}
    torch.manual_seed(0)
    model = generation_worker.build(settings).to(DTYPES[options.dtype])
    common = settings | {"dtype": options.dtype, "versions": versions(("torch", "transformers"))}
    common["device"] = generation_worker.name_of(torch.device(options.device))
    rows: list[dict] = []
    for way in options.ways or WAYS[: 1 if options.device == "cpu" else 2]:
        for batch in options.batch:
            with torch.no_grad():
                found = compare(Answers(model, settings, batch, way))
            rows.append({"batch": batch, "way": way, **found, **common})
            print(
                json.dumps({name: rows[-1][name] for name in ("batch", "way", *found)}), flush=True
            )
            options.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return rows


if __name__ == "__main__":
    main()
