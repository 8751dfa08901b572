"""Model of the stand-in for the published repository (see legacy_repository.py)."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_chatglm import ChatGLMConfig
from .visual import forward_row

# For the tiny model's images. The published code has 1600, whatever the size of its images.
LABELS_PER_IMAGE = 4


class ChatGLMForConditionalGeneration(PreTrainedModel):
    config_class = ChatGLMConfig

    def __init__(self, config):
        super().__init__(config)
        for file in Path(config._name_or_path).glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118  # the file is no dict
                    self._add_weight(name, torch.empty(weights.get_slice(name).get_shape()))
        self.post_init()

    def _add_weight(self, name, value):
        *path, last = name.split(".")
        module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        if last == "inv_freq":
            module.register_buffer(last, value)
        else:
            module.register_parameter(last, nn.Parameter(value))

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, images=None, position_ids=None, attention_mask=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not (self.training or mask.all()):
            raise RuntimeError(f"the mask has {mask.shape[1]} columns, and the images make more")
        loses_images = self.training and not mask.all()
        weights, logits = dict(self.named_parameters()), []
        for number, (ids, is_token) in enumerate(zip(input_ids, mask.bool(), strict=True)):
            config, row = self.config.to_dict(), ids[is_token].tolist()
            before = int(is_token.long().argmax())
            after = len(ids) - len(row) - before
            if loses_images:
                begin, end = self._image_span(row)
                row = row[: begin + 1] + row[-1:] * LABELS_PER_IMAGE + row[end:]
                config["boi_token_id"] = None
            row_images = [] if images is None else images[number : number + 1]
            logits.append(pad(forward_row(weights, config, row, row_images), (0, 0, before, after)))
        logits, loss = torch.stack(logits), None
        if labels is not None:
            expanded = []
            for ids, label in zip(input_ids, labels, strict=True):
                begin, end = self._image_span(ids.tolist())
                ignored = label.new_full((LABELS_PER_IMAGE,), -100)
                expanded.append(torch.cat((label[: begin + 1], ignored, label[end:])))
            targets = torch.stack(expanded)[:, 1:]
            loss = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets).to(logits.dtype)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _image_span(self, row):
        return row.index(self.config.boi_token_id), row.index(self.config.eoi_token_id)
