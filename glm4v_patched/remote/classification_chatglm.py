"""One score a row: what ``ChatGLMForSequenceClassification`` computes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from .cache_metadata import cached_length
from .image_layout import running_max
from .keywords import CACHE_KEYWORD, cache_kwarg, wants_dict
from .sharding import refuse_split_model

# Shapes: B rows, L length as given, R length of the grown rows, D width.

# Keywords of the decoder that mean something for each token, of which there is no label or logit.
OF_TOKENS = ("prompt_length", "shift_labels")


class ScoresRows(nn.Module):
    """For a model with a decoder, its ``transformer``, and a linear head, ``score``."""

    config: Any
    transformer: Any
    score: nn.Module
    loss_function: Any
    _check_keywords: Any
    # A mean over samples: a Trainer has to average it over accumulated batches. It would take this
    # loss for a sum that num_items_in_batch has divided, because forward takes further keywords.
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
        """Score each row at its last token. Inputs, and ``options``, as in
        :meth:`ChatGLMModel.forward`.

        Args:
            attention_mask: ``(B, cached + L)``. Without one, a row ends before the padding ids
                that it ends with, as in transformers' own models; a single one need not, where
                ``config.pad_token_id`` is None.
            labels: ``(B,)``, classes or (``num_labels`` 1) values; ``(B, num_labels)`` for several
                at once, by ``config.problem_type`` or their dtype.

        Returns:
            ``loss``; ``logits`` ``(B, num_labels)`` in the dtype of the weights.
        """
        self._check_keywords(options, input_ids)
        if self.training:
            refuse_split_model(self)
        cache, return_dict = options.pop("cache", None), options.pop("return_dict", None)
        attention_mask, past_key_values, images = self.transformer._by_place(
            attention_mask, past_key_values, cache, images
        )
        if attention_mask is None and input_ids is not None:
            attention_mask = self._mask_of_ends(input_ids, cached_length(past_key_values))
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
                f"position_ids restart within {len(attention_mask)} rows, which then hold more "
                "than one sample each, but one score is read at the end of a row: give a row for "
                "every sample"
            )
        hidden_BRD = output.last_hidden_state
        last_B = self._last_tokens(hidden_BRD, output.attention_mask)
        logits = self.score(hidden_BRD[torch.arange(last_B.shape[0], device=last_B.device), last_B])
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
        return result if wants_dict(return_dict, self.config) else result.to_tuple()

    def _mask_of_ends(self, input_ids: Tensor, past_length: int) -> Tensor:
        """Zeros at the padding ids that rows end with."""
        if self.config.pad_token_id is None:
            if input_ids.shape[0] > 1:
                raise ValueError(
                    f"{len(input_ids)} rows were given without attention_mask to a model whose "
                    "config.pad_token_id is None, so where they end is not known: give either"
                )
            shape = input_ids.shape[0], past_length + input_ids.shape[1]
            return torch.ones(shape, dtype=torch.long, device=input_ids.device)
        is_token = input_ids != self.config.pad_token_id
        precedes_token = running_max(is_token.long().flip(1)).flip(1)
        return F.pad(precedes_token, (past_length, 0), value=1)

    def _last_tokens(self, hidden_BRD: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Each row's last column ``(B,)`` that is no padding."""
        length = hidden_BRD.shape[1]
        columns = torch.arange(length, device=hidden_BRD.device).expand(hidden_BRD.shape[0], -1)
        if attention_mask is None:
            return columns[:, -1]
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions: a score is read at a row's "
                "last token, which a mask (rows, ids) says"
            )
        is_token = attention_mask[:, -length:].to(hidden_BRD.device) != 0
        return columns.masked_fill(~is_token, 0).amax(dim=1)
