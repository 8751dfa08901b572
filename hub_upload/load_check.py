"""The checks that run the published code, in a process that has nothing else of ours.

:mod:`verify` starts this file with ``python -I load_check.py REQUEST.json``. The package is made
impossible to import first, so what works here works for whoever downloads the repository. Results
are written one by one, because a process that is killed for its memory tells nothing afterwards.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
INDEX = "model.safetensors.index.json"
# Fields that transformers rewrites: where from, by which version, under which name, for whom.
OF_TRANSFORMERS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map"}
QUESTION = "What is in this picture?"
# A model of the real size is replaced by one of these widths, with the same vocabulary and images.
SHRUNK = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16}
SHRUNK |= {"num_attention_heads": 4, "multi_query_group_num": 2, "skip_logits": True}
SHRUNK_TOWER = {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}


class Skip(Exception):
    """There is nothing to check; the message says why."""


class Check(NamedTuple):
    name: str
    status: str
    detail: str


def run_check(name: str, function: Callable[[], str]) -> Check:
    """Whatever ``function`` raises fails this check."""
    try:
        return Check(name, PASSED, function())
    except Skip as reason:
        return Check(name, SKIPPED, str(reason))
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Check(name, FAILED, f"{kind}{error}")


def require(condition: object, message: str) -> None:
    """``assert`` that ``python -O`` leaves in."""
    if not condition:
        raise AssertionError(message)


def shorten(names: Iterable[str], limit: int = 3) -> str:
    """A few of many names, and how many there are."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" * (len(names) > limit))


class LoadCheck:
    """What is loaded by one check and used by the next.

    ``shapes`` are those in the files of weights, None where they are not at hand; ``whole`` says
    that the weights are in the folder, and small enough to be loaded.
    """

    def __init__(self, source: str, shapes: dict[str, list[int]] | None, whole: bool):
        self.source, self.shapes, self.whole = source, shapes, whole
        self.model: Any = None
        self.which = "real weights" if whole else "random weights, 2 + 2 layers of width 64"

    def load(self, auto: str, **options) -> Any:
        """What an Auto class of transformers makes of the folder: a class of the folder's own."""
        import transformers

        options |= {"trust_remote_code": True, "local_files_only": True}
        loaded = getattr(transformers, auto).from_pretrained(self.source, **options)
        module = type(loaded[0] if isinstance(loaded, tuple) else loaded).__module__
        require(module.startswith("transformers_modules."), f"{auto} loads a class of {module}")
        return loaded

    def read(self, name: str) -> dict[str, Any]:
        return json.loads(Path(self.source, name).read_text(encoding="utf-8"))

    def config_loads(self) -> str:
        self.config, given = self.load("AutoConfig"), self.read("config.json")
        values = json.loads(self.config.to_json_string(use_diff=False))
        lost = [k for k in given.keys() - OF_TRANSFORMERS if values.get(k, values) != given[k]]
        require(not lost, f"fields of config.json with another value once loaded: {lost}")
        return f"{type(self.config).__name__}, {len(given)} fields"

    def processor_loads(self) -> str:
        self.processor, self.tokenizer = self.load("AutoProcessor"), self.load("AutoTokenizer")
        self.load("AutoImageProcessor")
        for text in (QUESTION, "你好，世界！\n\tdef f(x):  return x"):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            require(self.tokenizer.decode(ids) == text, f"{text!r} does not survive its ids {ids}")
            require(max(ids) < self.config.padded_vocab_size, f"id {max(ids)} has no embedding")
        inputs = self.inputs(seed=0)
        side, patch = (self.config.vision_config[key] for key in ("image_size", "patch_size"))
        shape = tuple(inputs["pixel_values"].shape)
        require(shape == (1, 3, side, side), f"an image becomes {shape}, the tower takes {side}")
        ids = inputs["input_ids"][0].tolist()
        taken = ids.index(self.config.eoi_token_id) - ids.index(self.config.boi_token_id) - 1
        made = (side // patch // 2) ** 2
        require(taken == made, f"an image takes {taken} ids, the tower makes {made} vectors of it")
        return f"{len(self.tokenizer):,} ids, of which an image takes {made:,}"

    def parameters(self) -> str:
        """Names and shapes, on an empty model; without the files, names in the index."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=True)
        self.model_class = type(model)
        state = {name: list(value.shape) for name, value in model.state_dict().items()}
        trained = {name for name, _ in model.named_parameters()}
        told = self.shapes
        if told is None and Path(self.source, INDEX).exists():
            told = {name: state.get(name, []) for name in self.read(INDEX)["weight_map"]}
        if not told:
            raise Skip("no weights and no index are at hand")
        lacking, foreign = shorten(trained - told.keys()), shorten(told.keys() - state.keys())
        require(not lacking, f"parameters that are in no file: {lacking}")
        require(not foreign, f"tensors that are no parameter: {foreign}")
        other = [f"{n}, {shape} for {state[n]}" for n, shape in told.items() if shape != state[n]]
        require(not other, f"other shapes in the files than in the model: {shorten(other)}")
        number = sum(math.prod(state[name]) for name in trained)
        by = "the files of weights" if self.shapes else "the index"
        return f"{number:,} parameters, compared with {by}"

    def weights_load(self) -> str:
        if not self.whole:
            raise Skip("not at hand, or too large: names and shapes only, on an empty model")
        self.model, report = self.load("AutoModelForCausalLM", output_loading_info=True)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            require(not report[kind], f"{kind}: {shorten(map(str, report[kind]))}")
        wild = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        require(not wild, f"not finite: {shorten(wild)}")
        return f"{len(self.model.state_dict()):,} tensors, {self.model.dtype}"

    def generation(self) -> str:
        import torch

        if self.model is None:  # a small one of the same code, vocabulary and images
            values = self.config.to_dict() | SHRUNK
            values["vision_config"] = self.config.vision_config | SHRUNK_TOWER
            values = {name: value for name, value in values.items() if "dtype" not in name}
            torch.manual_seed(0)
            self.model = self.model_class(type(self.config)(**values))
        model, inputs, other = self.model.eval(), self.inputs(seed=0), self.inputs(seed=1)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            logits = [model(**batch).logits[0, -1].float() for batch in (inputs, other)]
        number = ids.shape[1] - inputs["input_ids"].shape[1]
        require(1 <= number <= 4, f"{number} tokens were generated, 4 were asked for")
        require(all(row.isfinite().all() for row in logits), "logits are not finite")
        change = (logits[0] - logits[1]).abs().max().item()
        require(change > 0, "another picture changes no logit: the model does not see it")
        return f"{number} tokens; another picture changes logits by {change:.1e}; {self.which}"

    def training_step(self) -> str:
        model = self.model.train()
        # transformers 5.23 renamed it and warns about the old name.
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        blocks = model.transformer.encoder.layers, model.transformer.vision.transformer.layers
        runs = Counter[Any]()
        for layer in [layer for layers in blocks for layer in layers]:
            layer.input_layernorm.register_forward_pre_hook(lambda norm, _: runs.update([norm]))
        loss = model(**self.inputs(seed=0, answer="A picture.")).loss
        require(loss.isfinite(), f"the loss is {loss.item()}")
        loss.backward()
        once = [number for number in runs.values() if number != 2]
        require(not once, f"{len(once)} layers are not recomputed for the backward pass")
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        without = [n for n, grad in grads.items() if grad is None or not grad.isfinite().all()]
        require(not without, f"{len(without)} have no finite gradient: {shorten(without)}")
        return f"loss {loss.item():.3f}; {len(runs)} layers were recomputed; {self.which}"

    def inputs(self, seed: int, answer: str | None = None) -> dict[str, Any]:
        """A question about a drawn picture; with an answer, labels for that."""
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        chat = [{"role": "user", "image": Image.fromarray(pixels), "content": QUESTION}]
        chat += [{"role": "assistant", "content": answer}] if answer else []
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        options |= {"add_generation_prompt": answer is None}
        inputs = self.processor.apply_chat_template(chat, **options)
        if answer:
            assistant = self.tokenizer.convert_tokens_to_ids("<|assistant|>")
            labels = inputs["labels"] = inputs["input_ids"].clone()
            labels[0, : labels[0].tolist().index(assistant) + 1] = -100
        if self.model is not None:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return dict(inputs)


# In the order in which they run.
STEPS = ["config loads", "processor loads", "parameters", "weights load", "generation"]
STEPS += ["training step"]


def main(request: Path) -> None:
    """Write a line of JSON for each check; the first that fails is the last."""
    values = json.loads(request.read_text(encoding="utf-8"))
    with open(values.pop("results"), "a", encoding="utf-8", buffering=1) as results:
        checks = LoadCheck(**values)
        for name in STEPS:
            check = run_check(name, getattr(checks, name.replace(" ", "_")))
            results.write(json.dumps(check, ensure_ascii=False) + "\n")
            if check.status == FAILED:
                break


if __name__ == "__main__":
    sys.modules["glm4v_patched"] = None  # type: ignore[assignment]
    main(Path(sys.argv[1]))
