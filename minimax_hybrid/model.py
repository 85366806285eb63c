"""The model, from tokens to logits: seven lightning layers, then one softmax layer, each with its experts.

    x = embedding(tokens)
    for every layer:
        h = norm1(x);  x = alpha * (h or x) + beta * attention(h)        lightning or softmax
        h = norm2(x);  x = alpha * (h or x) + beta * experts(h)
    logits = head(norm(x))                                              in float32

Shapes: B batch, T positions, M model width, E experts, A experts per token, L layers, V vocabulary.
(M1 report, section 2; released modeling file.)
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.utils import can_return_tuple

from minimax_kernels import IGNORED
from minimax_kernels.backends import can_check_values

from .cache import HybridCache
from .compat import CACHE_NAME, MASK_CACHE_NAME, HybridCausalLMOutput, HybridModelOutput
from .config import MiniMaxM1Config, MiniMaxText01Config
from .decoder_layer import DecoderLayer, LayerOutput
from .experts import load_balancing_loss
from .generation import HybridGenerationMixin
from .layers import RMSNorm, RotaryEmbedding
from .lm_head import LMHead, Scoring, compute_logits, head_log_probs
from .parallel.plans import EXPERT_PLAN, HEAD_FSDP_PLAN, HEAD_TENSOR_PLAN, TENSOR_PLAN
from .pretrained import HybridPreTrainedModel
from .sequences import SequenceMetadata, find_sequences

# How some collators mark packed documents, beside or in place of position ids
_FLASH_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class MiniMaxM1Model(HybridPreTrainedModel):
    """Tokens (B, T) to hidden states (B, T, M) after the final norm."""

    _tp_plan, _ep_plan = TENSOR_PLAN, EXPERT_PLAN

    def __init__(self, config: MiniMaxM1Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.rope_theta)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        cache: HybridCache | None = None,
        routed_experts: Tensor | None = None,
        output_routed_experts: bool = False,
        sequences: SequenceMetadata | None = None,
        **kwargs: Any,
    ) -> HybridModelOutput:
        """Run the stack.

        Args:
            input_ids: (B, T) tokens, or `inputs_embeds` (B, T, M) in their place.
            attention_mask: (B, past + T), 0 at padding, wherever it lies.
            position_ids: (B, T); where they restart and no mask hides anything, documents are packed.
            cache (or past_key_values): continue what it holds, whatever `use_cache` says; made here if
                `use_cache` and none is given.
            routed_experts: (B, T, L, A) experts to use instead of the router's own choice.
            output_routed_experts: return the experts used, (B, T, L, A) int64.
            sequences: what mask and position ids describe, where the caller has found it already.

        Returns:
            `last_hidden_state` (B, T, M); `hidden_states` has L + 1 entries, the last one after the final
            norm; `router_logits` are L tensors (B * T, E); `attentions` have None in lightning layers.
        """
        bounds = [name for name in _FLASH_BOUNDS if kwargs.get(name) is not None]
        if bounds and position_ids is None:
            raise ValueError(
                f"{bounds[0]} bounds packed documents for one attention kernel only; give position_ids that "
                "restart at each document, which every layer follows"
            )
        cache = _one_cache(cache, past_key_values)
        x = self._embed(input_ids, inputs_embeds)
        B, T, _ = x.shape
        cache = self._cache_for(cache, use_cache)
        replayed = self._replayed(routed_experts, B, T)
        if sequences is None:
            sequences = self.find_sequences(x, attention_mask, position_ids, cache)
        shared = dict(
            rotary=self.rotary_emb(sequences.position_ids),
            attention_mask=self._causal_mask(x, sequences, cache),
        )
        wants_states, wants_attentions, wants_router = (
            _asked(given, getattr(self.config, f"output_{name}"))
            for name, given in (
                ("hidden_states", output_hidden_states),
                ("attentions", output_attentions),
                ("router_logits", output_router_logits),
            )
        )
        inputs, attentions, router_logits, routed = [], [], [], []
        if cache is not None:
            cache.begin(B)
        for layer, expert_ids in zip(self.layers, replayed, strict=True):
            if wants_states:
                inputs.append(x)
            out = LayerOutput(*layer(x, sequences, topk_expert_ids=expert_ids, cache=cache, **shared))
            x = out.hidden
            attentions.append(out.attentions)
            router_logits.append(out.router_logits)
            routed.append(out.topk_expert_ids)
        x = self.norm(x)
        if cache is not None:
            cache.end(sequences.cached_token_mask())
        routed_experts = None
        if output_routed_experts:
            stacked = torch.stack([ids.to(x.device) for ids in routed], dim=1)
            routed_experts = stacked.view(B, T, len(routed), -1)
        return HybridModelOutput(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if wants_states else None,
            # transformers annotates a tuple of one tensor, and forgets that a layer may have none
            attentions=tuple(attentions) if wants_attentions else None,  # type: ignore[arg-type]
            router_logits=tuple(router_logits) if wants_router else None,  # type: ignore[arg-type]
            routed_experts=routed_experts,
            **{CACHE_NAME: cache},
        )

    def find_sequences(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: HybridCache | None = None,
    ) -> SequenceMetadata:
        """Where the sequences of an input x (B, T) or (B, T, M) lie."""
        past = 0 if cache is None else cache.get_seq_length()
        return find_sequences(
            *x.shape[:2],
            device=x.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past=past,
            past_mask=None if cache is None else cache.token_mask,
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if 0 in given.shape[:2]:
            raise ValueError(
                f"the input is empty, (B, T) = {tuple(given.shape[:2])}; give a sequence of a token at least"
            )
        if inputs_embeds is not None:
            return inputs_embeds
        if given.ndim != 2:
            raise ValueError(f"input_ids must be (batch, positions), got {tuple(given.shape)}")
        V = self.embed_tokens.num_embeddings
        if can_check_values(given) and not 0 <= given.min() <= given.max() < V:
            wrong = given[(given < 0) | (given >= V)][0]
            raise ValueError(f"token id {int(wrong)} is not in the vocabulary of {V}; check the tokenizer")
        return self.embed_tokens(given)

    def _cache_for(self, cache: HybridCache | None, use_cache: bool | None) -> HybridCache | None:
        """The given cache, a new one if one is wanted, or None."""
        if cache is not None and not isinstance(cache, HybridCache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}, and lightning layers need a "
                "HybridCache(model.config)"
            )
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # a checkpointed layer runs twice and would enter the cache twice
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    f"a cache of {cache.get_seq_length()} positions cannot be continued under gradient "
                    "checkpointing; call model.gradient_checkpointing_disable() or give the whole sequence"
                )
            return None
        if cache is None and _asked(use_cache, self.config.use_cache):
            cache = HybridCache(self.config)
        return cache

    def _replayed(self, routed_experts: Tensor | None, B: int, T: int) -> list[Tensor | None]:
        """The given experts of each layer, (N, A); None where routers choose."""
        L, A = self.config.num_hidden_layers, self.config.num_experts_per_tok
        if routed_experts is None:
            return [None] * L
        if routed_experts.shape != (B, T, L, A):
            raise ValueError(
                f"routed_experts must be (B, T, L, A) = {(B, T, L, A)}, got {tuple(routed_experts.shape)}; "
                "replay needs the routing of exactly these positions"
            )
        outside = (routed_experts < 0) | (routed_experts >= self.config.num_local_experts)
        if can_check_values(routed_experts) and bool(outside.any()):
            raise ValueError(
                f"routed_experts holds {int(routed_experts[outside][0])}; experts are numbered from 0 to "
                f"{self.config.num_local_experts - 1}"
            )
        return list(routed_experts.long().reshape(B * T, L, A).unbind(1))

    def _causal_mask(
        self, x: Tensor, sequences: SequenceMetadata, cache: HybridCache | None
    ) -> Tensor | None:
        """The mask of softmax layers, in the form that the chosen attention takes."""
        packed = sequences.cu_seqlens is not None
        past = None if packed or cache is None else cache  # packed documents begin with an empty cache
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None if sequences.full_token_mask is None else sequences.full_token_mask.long(),
            position_ids=sequences.position_ids if packed else None,
            **{MASK_CACHE_NAME: past},
        )


class MiniMaxM1ForCausalLM(HybridPreTrainedModel, HybridGenerationMixin, GenerationMixin):
    """The language model: next-token logits in float32, loss, and log-probabilities of given tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan, _fsdp_plan = HEAD_TENSOR_PLAN, HEAD_FSDP_PLAN

    def __init__(self, config: MiniMaxM1Config):
        super().__init__(config)
        self.model = MiniMaxM1Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, head_dtype=config.head_dtype)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: HybridCache | None = None,
        routed_experts: Tensor | None = None,
        output_routed_experts: bool = False,
        scoring: Scoring | None = None,
        **kwargs: Any,
    ) -> HybridCausalLMOutput:
        """Logits (B, T, V), the last `logits_to_keep` of them if that is above 0, in `config.head_dtype`.

        Args (beyond `MiniMaxM1Model.forward`):
            labels: (B, T), -100 where nothing is to be learnt; a token is predicted from the one before it
                in its own sequence, wherever padding lies. The loss is the mean (0 where nothing is learnt),
                or the sum over `num_items_in_batch` where a trainer gives it, plus `router_aux_loss_coef`
                times the load-balancing loss if router logits are asked for, by the same share of the whole.
            scoring: return `log_probs` and `entropies` of `input_ids` instead of logits, as `log_probs` does.
        """
        wants_router = _asked(output_router_logits, self.config.output_router_logits)
        cache = _one_cache(cache, past_key_values)
        x = inputs_embeds if input_ids is None else input_ids
        sequences = None
        if x is not None and (labels is not None or scoring is not None or wants_router):
            if labels is not None and labels.shape != x.shape[:2]:
                raise ValueError(
                    f"labels must be (B, T) = {tuple(x.shape[:2])}, one for each position, got "
                    f"{tuple(labels.shape)}; label -100 where nothing is to be learnt"
                )
            sequences = self.model.find_sequences(x, attention_mask, position_ids, cache)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_router_logits=wants_router,
            routed_experts=routed_experts,
            output_routed_experts=output_routed_experts or wants_router,
            sequences=sequences,
            **{name: kwargs.get(name) for name in _FLASH_BOUNDS},
        )
        hidden = outputs.last_hidden_state
        if scoring is not None and sequences is not None:
            return self._score(hidden, input_ids, sequences, scoring)
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; 0 keeps all positions, n the last n")
        # -0 is 0: all of them
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        logits = compute_logits(self.lm_head, hidden[:, kept], head_dtype=self.config.head_dtype)
        loss = aux_loss = None
        if labels is not None and sequences is not None:
            targets = sequences.next_tokens(labels)
            learnt = (targets != IGNORED).sum()
            total = kwargs.pop("num_items_in_batch", None)
            total = learnt.clamp(min=1) if total is None else total
            loss = self.loss_function(
                logits, None, self.vocab_size, num_items_in_batch=total, shift_labels=targets, **kwargs
            )
        if wants_router and sequences is not None:
            expert_ids = outputs.routed_experts.flatten(0, 1).unbind(1)
            aux_loss = load_balancing_loss(outputs.router_logits, expert_ids, sequences.token_mask)
            if loss is not None:
                # a micro-batch counts by its share of the tokens, so that all of them add up to one loss
                loss = loss + self.config.router_aux_loss_coef * (learnt / total) * aux_loss.to(loss.device)
        return HybridCausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            routed_experts=outputs.routed_experts if output_routed_experts else None,
            **{CACHE_NAME: outputs.cache},
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Take another head; a plain layer becomes one with the arithmetic of `config.head_dtype`."""
        if type(new_embeddings) is nn.Linear or type(new_embeddings) is nn.Embedding:
            new_embeddings = LMHead.of(new_embeddings, head_dtype=self.config.head_dtype).train(self.training)
        super().set_output_embeddings(new_embeddings)

    def _get_resized_lm_head(
        self,
        old_lm_head: nn.Linear,
        new_num_tokens: int | None = None,
        transposed: bool = False,
        mean_resizing: bool = True,
    ) -> nn.Linear:
        resized = super()._get_resized_lm_head(old_lm_head, new_num_tokens, transposed, mean_resizing)
        if resized is old_lm_head:
            return resized
        return LMHead.of(resized, head_dtype=self.config.head_dtype).train(old_lm_head.training)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write the published layout, with a head of another type saved in the model's own type."""
        if state_dict is None and self.lm_head.weight.dtype != self.dtype:
            state_dict = self.state_dict()
            state_dict["lm_head.weight"] = state_dict["lm_head.weight"].to(self.dtype)
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)

    def log_probs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        routed_experts: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """log p(token t | tokens before it), (B, T) float32, without a tensor over the vocabulary.

        Differentiable. Over the full vocabulary at the given sampling temperature. 0 where nothing precedes a
        token (the first of a sequence or packed document) and at padding.

        Args:
            input_ids: (B, T); attention_mask, position_ids, routed_experts: as in the forward pass.
            entropy: return the entropy (B, T) of each distribution as well, in nats.
        """
        # through the module's own call: hooks and sharding wrappers see every use of the weights
        scored = self(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            routed_experts=routed_experts,
            use_cache=False,
            scoring=Scoring(temperature, entropy),
            return_dict=True,
        )
        return (scored.log_probs, scored.entropies) if entropy else scored.log_probs

    def _score(
        self, hidden: Tensor, input_ids: Tensor | None, sequences: SequenceMetadata, scoring: Scoring
    ) -> HybridCausalLMOutput:
        assert input_ids is not None  # sequences were found by them
        targets, head_dtype = sequences.next_tokens(input_ids.long()), self.config.head_dtype
        results = head_log_probs(self.lm_head, hidden, targets, scoring, head_dtype=head_dtype)
        # from the position that predicts a token to the token's own
        log_probs, *rest = (nn.functional.pad(x, (1, 0)).gather(1, sequences.previous + 1) for x in results)
        return HybridCausalLMOutput(log_probs=log_probs, entropies=rest[0] if rest else None)


class MiniMaxText01ForCausalLM(MiniMaxM1ForCausalLM):
    """The same model under the name of the earlier release."""

    config_class = MiniMaxText01Config


class MiniMaxText01Model(MiniMaxM1Model):
    """The stack under the name of the earlier release."""

    config_class = MiniMaxText01Config


def _asked(given: bool | None, configured: bool | None) -> bool:
    return bool(configured if given is None else given)


def _one_cache(cache: HybridCache | None, past_key_values: HybridCache | None) -> HybridCache | None:
    """The cache under whichever of its two names it came."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; give one of them")
    return past_key_values if cache is None else cache
