"""The checks that run the published code, in a process that has nothing else of ours.

:mod:`verify` starts this file with ``python -I stranger.py REQUEST.json``. The package is made
impossible to import first, so what works here works for whoever downloads the repository. Results
are written one by one, because a process that is killed for its memory tells nothing afterwards.
"""

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# In the order in which they run; they need what verify.py says they need.
NAMES = (
    "config loads",
    "tokenizer loads",
    "processor loads",
    "parameter names",
    "parameter shapes",
    "weights load",
    "generation",
    "training step",
)
# Fields that transformers rewrites: where from, by which version, under which name, for whom.
OF_TRANSFORMERS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map"}
QUESTION = "What is in this picture?"
# A model of the real size is replaced by one of these widths, with the same vocabulary and images.
SHRUNK = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "kv_channels": 16,
    "num_attention_heads": 4,
    "multi_query_group_num": 2,
    "skip_logits": True,
}
SHRUNK_TOWER = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
}


class Skip(Exception):
    """There is nothing to check; the message says why."""


@dataclass
class Check:
    name: str
    status: str
    detail: str


@dataclass
class Checks:
    """Runs checks and keeps what came of them.

    Attributes:
        needs: For a check, those before it without which it says nothing.
        heard: Is told each result at once.
    """

    needs: dict[str, Collection[str]]
    heard: Callable[[Check], None] = lambda check: None
    done: dict[str, Check] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)

    def run(self, name: str, function: Callable[[], str]) -> None:
        """Whatever ``function`` raises fails this check and no other."""
        lacking = [n for n in self.needs.get(name, ()) if self.failed(n) or n in self.blocked]
        if lacking:
            self.blocked.add(name)
            self.add(Check(name, SKIPPED, f"cannot be checked without: {', '.join(lacking)}"))
            return
        try:
            result = Check(name, PASSED, function())
        except Skip as reason:
            result = Check(name, SKIPPED, str(reason))
        except Exception as error:  # a check that crashes has failed, and the others go on
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            result = Check(name, FAILED, f"{kind}{error}")
        self.add(result)

    def add(self, check: Check) -> None:
        self.done[check.name] = check
        self.heard(check)

    def failed(self, name: str) -> bool:
        return name in self.done and self.done[name].status == FAILED


def require(condition: object, message: str) -> None:
    """``assert`` that ``python -O`` leaves in."""
    if not condition:
        raise AssertionError(message)


def shorten(names: Iterable[str], limit: int = 3) -> str:
    """A few of many names, and how many there are."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" * (len(names) > limit))


class Stranger:
    """What is loaded by one check and used by the next.

    Args:
        source: Folder.
        given: What its config.json holds.
        tensors: Shape of every tensor in the files of weights; None where they are not at hand.
        names: Names of the tensors, also where only the index is at hand; None without that.
        total_size: Bytes of all tensors according to the index.
        whole: The weights are small enough to be loaded.
    """

    def __init__(
        self,
        source: str,
        given: dict,
        tensors: dict[str, list[int]] | None,
        names: list[str] | None,
        total_size: int | None,
        whole: bool,
    ):
        self.options = {"trust_remote_code": True, "local_files_only": True}
        self.source = source
        self.given = {k: v for k, v in given.items() if k not in OF_TRANSFORMERS}
        self.tensors = tensors
        self.names = names
        self.total_size = total_size
        self.whole = whole

    def config_loads(self) -> str:
        import transformers

        try:
            import glm4v_patched  # noqa: F401
        except ImportError:
            pass
        else:
            raise AssertionError("the package glm4v_patched can be imported: this proves nothing")
        self.config = transformers.AutoConfig.from_pretrained(self.source, **self.options)
        published(self.config)
        values = json.loads(self.config.to_json_string(use_diff=False))
        lost = [k for k, v in self.given.items() if k not in values or values[k] != v]
        require(not lost, f"fields of config.json with another value once loaded: {lost}")
        return f"{type(self.config).__name__} on transformers {transformers.__version__}"

    def tokenizer_loads(self) -> str:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.source, **self.options)
        published(self.tokenizer)
        for text in (QUESTION, "你好，世界！\n\tdef f(x):  return x"):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            require(self.tokenizer.decode(ids) == text, f"{text!r} does not survive its ids {ids}")
            require(max(ids) < self.config.padded_vocab_size, f"id {max(ids)} has no embedding")
        return f"{type(self.tokenizer).__name__}, {len(self.tokenizer):,} ids"

    def processor_loads(self) -> str:
        from transformers import AutoImageProcessor, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(self.source, **self.options)
        published(self.processor)
        published(AutoImageProcessor.from_pretrained(self.source, **self.options))
        inputs = self.inputs(seed=0)
        tower = self.config.vision_config
        side, patch = tower["image_size"], tower["patch_size"]
        shape = tuple(inputs["pixel_values"].shape)
        require(shape == (1, 3, side, side), f"an image becomes {shape}, the tower takes {side}")
        ids = inputs["input_ids"][0].tolist()
        begin, end = ids.index(self.config.boi_token_id), ids.index(self.config.eoi_token_id)
        positions = (side // patch // 2) ** 2
        require(
            end - begin - 1 == positions,
            f"an image takes {end - begin - 1} ids, the tower makes {positions} vectors of it",
        )
        return f"{type(self.processor).__name__}, {positions:,} ids an image"

    def parameter_names(self) -> str:
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=True)
        published(model)
        self.model_class = type(model)
        if self.names is None:
            raise Skip("no weights and no index are at hand")
        self.state = {name: list(value.shape) for name, value in model.state_dict().items()}
        self.buffers = set(self.state) - {name for name, _ in model.named_parameters()}
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.itemsize = torch.empty((), dtype=self.config.dtype or torch.float32).element_size()
        names = set(self.names)
        lacking, foreign = set(self.state) - self.buffers - names, names - set(self.state)
        require(
            not lacking and not foreign,
            f"{len(lacking)} parameters are in no file: {shorten(lacking)}; "
            f"{len(foreign)} tensors are no parameter: {shorten(foreign)}",
        )
        return f"{len(names):,} names, {self.parameters:,} parameters; the model was built empty"

    def parameter_shapes(self) -> str:
        if self.tensors is not None:
            wrong = [
                f"{name}: {shape} in the file, {self.state[name]} in the model"
                for name, shape in self.tensors.items()
                if shape != self.state[name]
            ]
            require(not wrong, f"{len(wrong)} shapes differ; {shorten(wrong)}")
            return f"{len(self.tensors):,} shapes, read from the files of weights"
        if self.total_size is None:
            raise Skip("no weights are at hand, and the index tells no size")
        kept = sum(math.prod(self.state[name]) for name in self.buffers)
        sizes = [self.itemsize * self.parameters, self.itemsize * (self.parameters + kept)]
        require(
            self.total_size in sizes,
            f"the index tells {self.total_size:,} bytes; the parameters take {sizes[0]:,} at "
            f"{self.itemsize} bytes each, {sizes[1]:,} with buffers",
        )
        return f"no weights at hand; the index's {self.total_size:,} bytes are the parameters'"

    def weights_load(self) -> str:
        from transformers import AutoModelForCausalLM

        if not self.whole:
            raise Skip("not at hand, or too large: names and shapes only, on an empty model")
        self.model, report = AutoModelForCausalLM.from_pretrained(
            self.source, output_loading_info=True, **self.options
        )
        published(self.model)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            require(not report[kind], f"{kind}: {shorten(map(str, report[kind]))}")
        wild = [n for n, p in self.model.named_parameters() if not p.isfinite().all()]
        require(not wild, f"not finite: {shorten(wild)}")
        return f"{len(self.model.state_dict()):,} tensors, {self.model.dtype}"

    def generation(self) -> str:
        import torch

        model = self.model_to_run().eval()
        inputs = self.inputs(seed=0)
        prompt = inputs["input_ids"].shape[1]
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            other = inputs | {"pixel_values": self.inputs(seed=1)["pixel_values"]}
            logits = [model(**batch).logits[0, -1].float() for batch in (inputs, other)]
        new = ids[0, prompt:].tolist()
        require(1 <= len(new) <= 4, f"{len(new)} tokens were generated, 4 were asked for")
        require(all(row.isfinite().all() for row in logits), "logits are not finite")
        change = (logits[0] - logits[1]).abs().max().item()
        require(change > 0, "another picture changes no logit: the model does not see it")
        return f"{len(new)} tokens; another picture changes logits by {change:.1e}; {self.which()}"

    def training_step(self) -> str:
        import torch

        model = self.model_to_run().train()
        # transformers 5.23 renamed it and warns about the old name.
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        towers = {
            "language model": model.transformer.encoder.layers,
            "vision tower": model.transformer.vision.transformer.layers,
        }
        runs = {}
        for tower, layers in towers.items():
            for number, layer in enumerate(layers):
                runs[tower, number] = 0

                def count(*_, key=(tower, number)):
                    runs[key] += 1

                layer.input_layernorm.register_forward_pre_hook(count)
        inputs = self.inputs(seed=0, answer="A picture.")
        loss = model(**inputs).loss
        require(loss.isfinite(), f"the loss is {loss.item()}")
        loss.backward()
        once = [f"{tower} layer {number}" for (tower, number), times in runs.items() if times != 2]
        require(not once, f"not recomputed for the backward pass: {shorten(once)}")
        parameters = dict(model.named_parameters())
        grads = {name: parameter.grad for name, parameter in parameters.items()}
        without = [n for n, grad in grads.items() if grad is None or not grad.isfinite().all()]
        require(not without, f"{len(without)} have no finite gradient: {shorten(without)}")
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        wild = [name for name, p in parameters.items() if not p.isfinite().all()]
        require(not wild, f"not finite after one step: {shorten(wild)}")
        counted = ", ".join(f"{len(layers)} of the {tower}" for tower, layers in towers.items())
        return f"loss {loss.item():.3f}; recomputed layers: {counted}; {self.which()}"

    def which(self) -> str:
        if self.whole:
            return "real weights"
        return "random weights, 2 + 2 layers of width 64: the whole model is too large for a check"

    def model_to_run(self):
        """The model with its weights, or a small one of the same code, vocabulary and images."""
        import torch

        if not hasattr(self, "model"):
            values = self.config.to_dict() | SHRUNK
            values["vision_config"] = self.config.vision_config | SHRUNK_TOWER
            values = {name: value for name, value in values.items() if "dtype" not in name}
            torch.manual_seed(0)
            self.model = self.model_class(type(self.config)(**values))
        return self.model

    def inputs(self, seed: int, answer: str | None = None):
        """A question about a drawn picture; with an answer, labels for that."""
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        messages = [{"role": "user", "image": Image.fromarray(pixels), "content": QUESTION}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        inputs = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=answer is None,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        if answer is not None:
            ids = inputs["input_ids"][0].tolist()
            assistant = self.tokenizer.convert_tokens_to_ids("<|assistant|>")
            inputs["labels"] = inputs["input_ids"].clone()
            inputs["labels"][0, : ids.index(assistant) + 1] = -100
        if hasattr(self, "model"):
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return dict(inputs)


def published(thing: object) -> None:
    module = type(thing).__module__
    require(
        module.startswith("transformers_modules."),
        f"{type(thing).__name__} is {module}'s and not the repository's",
    )


def main(request: Path) -> None:
    values = json.loads(request.read_text(encoding="utf-8"))
    results = Path(values.pop("results"))
    needs = values.pop("needs")
    stranger = Stranger(**values)
    with results.open("a", encoding="utf-8") as file:

        def write(check: Check) -> None:
            file.write(json.dumps(asdict(check), ensure_ascii=False) + "\n")
            file.flush()

        checks = Checks(needs, write)
        for name in NAMES:
            checks.run(name, getattr(stranger, name.replace(" ", "_")))


if __name__ == "__main__":
    sys.modules["glm4v_patched"] = None
    main(Path(sys.argv[1]))
