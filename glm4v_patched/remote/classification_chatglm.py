"""Sequence classification: the forward pass of ``ChatGLMForSequenceClassification``."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from .cache_metadata import cached_length
from .image_layout import exportable_cummax
from .keywords import CACHE_KEYWORD, cache_kwarg, resolve_return_dict
from .sharding import refuse_device_map_in_several_processes

# A name's suffix lists the tensor's dimensions: hidden_BRD is (B, R, D).
# Shapes: B sequences, L length of input_ids, R expanded length, D hidden size.

# Keywords of the decoder that a classifier refuses, because they describe single tokens.
PER_TOKEN_KWARGS = ("prompt_length", "shift_labels")


class SequenceScoringMixin(nn.Module):
    """Mixin that adds ``forward`` to a model with a ``transformer`` and a linear ``score`` head."""

    config: Any
    transformer: Any
    score: nn.Module
    loss_function: Any
    _check_keywords: Any
    # The loss is a mean over the samples of a batch, so the Trainer has to average it over
    # accumulated batches. Without this attribute, the Trainer takes **options in forward as a sign
    # that forward divides the loss by num_items_in_batch.
    accepts_loss_kwargs = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        images: Tensor | None = None,
        labels: Tensor | None = None,
        **options,
    ) -> SequenceClassifierOutputWithPast | tuple:
        """Score each sequence at its last token.

        :meth:`ChatGLMModel.forward` describes the arguments that are not listed here, and
        ``options``.

        Args:
            attention_mask: ``(B, past_length + L)``. Without a mask, padding ids at the end of a
                sequence count as padding, as in transformers' own models. A batch of one sequence
                needs no mask if ``config.pad_token_id`` is None.
            labels: ``(B,)``: a class for each sequence, or a value if ``num_labels`` is 1.
                ``(B, num_labels)``: several classes or values for each sequence.
                ``config.problem_type``, or by default the dtype, decides which.

        Returns:
            ``loss``; ``logits`` ``(B, num_labels)`` in the dtype of the weights.

        Raises:
            ValueError: The end of a sequence is unknown, or a sequence is packed.
        """
        self._check_keywords(options, input_ids)
        if self.training:
            refuse_device_map_in_several_processes(self)
        cache, return_dict = options.pop("cache", None), options.pop("return_dict", None)
        attention_mask, past_key_values, images = self.transformer._resolve_positional_args(
            attention_mask, past_key_values, cache, images
        )
        if attention_mask is None and input_ids is not None:
            attention_mask = self._mask_trailing_padding(input_ids, cached_length(past_key_values))
        output = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            images=images,
            return_dict=True,
            **options,
        )
        if attention_mask is not None and output.attention_mask is None:
            raise ValueError(
                f"position_ids restart within the {len(attention_mask)} sequences, so they are "
                "packed, but one score is computed per sequence: pass each sample as a sequence of "
                "its own"
            )
        hidden_BRD = output.last_hidden_state
        columns_B = self._last_tokens(hidden_BRD, output.attention_mask)
        sequences_B = torch.arange(columns_B.shape[0], device=columns_B.device)
        logits = self.score(hidden_BRD[sequences_B, columns_B])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
        result = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            **cache_kwarg(getattr(output, CACHE_KEYWORD)),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
        return result if resolve_return_dict(return_dict, self.config) else result.to_tuple()

    def _mask_trailing_padding(self, input_ids: Tensor, past_length: int) -> Tensor:
        """Return a mask ``(B, past_length + L)`` with 0 at trailing padding ids."""
        if self.config.pad_token_id is None:
            if input_ids.shape[0] > 1:
                raise ValueError(
                    f"the ends of {len(input_ids)} sequences are unknown without attention_mask, "
                    "as config.pad_token_id is None: pass attention_mask or set pad_token_id"
                )
            shape = input_ids.shape[0], past_length + input_ids.shape[1]
            return torch.ones(shape, dtype=torch.long, device=input_ids.device)
        is_token = input_ids != self.config.pad_token_id
        is_before_end = exportable_cummax(is_token.long().flip(1)).flip(1)
        return F.pad(is_before_end, (past_length, 0), value=1)

    def _last_tokens(self, hidden_BRD: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the column ``(B,)`` of each sequence's last token that is not padding."""
        length = hidden_BRD.shape[1]
        columns = torch.arange(length, device=hidden_BRD.device).expand(hidden_BRD.shape[0], -1)
        if attention_mask is None:
            return columns[:, -1]
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions: a score is computed at a "
                "sequence's last token, which only a 2D mask (sequences, tokens) shows"
            )
        is_token = attention_mask[:, -length:].to(hidden_BRD.device) != 0
        return columns.masked_fill(~is_token, 0).amax(dim=1)
