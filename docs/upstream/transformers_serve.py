"""Load a model that comes with its own code as `transformers serve --trust-remote-code` does.

Expected is that the model answers, and that one with an image processor may get images.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    CLIPImageProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.cli.serving.model_manager import ModelManager

CODE = """from transformers import LlamaForCausalLM
class MyModel(LlamaForCausalLM): pass
"""

print("transformers", transformers.__version__, "torch", torch.__version__)
wrong = 0
for title in ("a model of text", "a model of images and text"):
    with tempfile.TemporaryDirectory() as folder:
        words = Tokenizer(models.WordLevel({"a": 0, "<image>": 1}))
        image_token = {"image_token": "<image>"}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, extra_special_tokens=image_token
        )
        auto_class = "AutoModelForCausalLM"
        if title != "a model of text":
            LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=4).save_pretrained(folder)
            auto_class = "AutoModelForImageTextToText"
        tokenizer.save_pretrained(folder)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = LlamaConfig(vocab_size=8, num_attention_heads=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())
        config |= {"architectures": ["MyModel"], "auto_map": {auto_class: "modeling.MyModel"}}
        path.write_text(json.dumps(config))
        Path(folder, "modeling.py").write_text(CODE)
        try:
            # Without a timeout, whose thread would keep this process alive for five minutes.
            manager = ModelManager(device="cpu", trust_remote_code=True, model_timeout=-1)
            model, processor = manager.load_model_and_processor(folder)
            modality = manager.get_model_modality(model, processor=processor)
            new = model.generate(torch.tensor([[0]]), max_new_tokens=2).shape[1] - 1
            print(f"{title}: {type(model).__name__}, {modality}, {new} new tokens")
        except (AttributeError, ValueError) as error:
            print(f"{title}: {type(error).__name__}: {error}")
            wrong += 1
print(f"{wrong} of 2 models cannot be served")
sys.exit(wrong > 0)
