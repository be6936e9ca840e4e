"""A causal language model with a slot cache: prefill, decode, weights in place. Knows nothing of requests or sampling.

Invariant: a_model_whose_attention_is_not_standard_is_refused (its slot decoding is compared with a plain forward pass
at load).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from producers.generation.engines.facts import ModelFacts, one_line
from producers.generation.engines.slots.cache import SlotCache
from producers.generation.settings import GenerationSettings
from schemas.errors import ModelError


class SlotModel:
    """Model and cache on one device."""

    def __init__(self, model_path: str, facts: ModelFacts, settings: GenerationSettings) -> None:
        self.device = _device(settings.device)
        dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        except Exception as error:
            raise ModelError(
                f"expected loadable weights at {model_path}, got: {one_line(error)}; "
                f"set the model to a complete model directory"
            ) from error
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._lowest = torch.finfo(self._model.dtype).min
        self.cache = SlotCache(facts.config.get_text_config().num_hidden_layers)
        self._indices = torch.arange(1, device=self.device)
        check_reach(model_path, facts)
        self._check_attention(model_path, facts)

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[range]) -> None:
        """Run prompt prefixes, each once, and start its rows of the cache from it. Room must have been reserved."""
        longest = max(len(prefix) for prefix in prefixes)
        padded = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=self.device)
        prefilled = DynamicCache(config=self._model.config)
        positions = torch.arange(longest, device=self.device).unsqueeze(0)
        self._model(
            input_ids=padded, position_ids=positions, past_key_values=prefilled, use_cache=True, logits_to_keep=1
        )
        for index, (prefix, span) in enumerate(zip(prefixes, rows, strict=True)):
            self.cache.fill(span.start, span.stop, prefilled, index, len(prefix))

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Feed one token per row.

        Args:
            tokens: int64 (n), the token of rows 0..n-1.
            positions: int64 (n), where they stand.
            longest: the largest position plus one.

        Returns:
            Logits (n, vocabulary).
        """
        self.cache.place.set(positions, longest)
        if len(self._indices) < longest:
            self._indices = torch.arange(2 * longest, device=self.device)
        column = positions.unsqueeze(1)
        hidden = self._indices[:longest] > column
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self.device).masked_fill_(hidden, self._lowest)
        output = self._model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask[:, None, None, :],
            position_ids=column,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy checked weights over the model's, tensor by tensor."""
        present = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                present[name].copy_(tensor)

    @torch.inference_mode()
    def _check_attention(self, model_path: str, facts: ModelFacts) -> None:
        length = min(6, facts.max_length)
        prompts = torch.arange(2 * length, device=self.device).remainder(facts.vocab_size).view(2, length)
        lengths = (length, length - 1)
        try:
            expected = self._model(input_ids=prompts).logits.float().log_softmax(-1)
            self.cache.reserve(2, length, 0, 0)
            self.prefill(
                [row[: end - 1].tolist() for row, end in zip(prompts, lengths, strict=True)], (range(1), range(1, 2))
            )
            last = torch.tensor(lengths, device=self.device) - 1
            rows = torch.arange(2, device=self.device)
            found = self.decode(prompts[rows, last], last, length).float().log_softmax(-1)
            difference = (found - expected[rows, last]).abs().mean().item()
        except Exception as error:
            raise _unsupported(model_path, one_line(error)) from error
        finally:
            self.cache.release()
        if not difference < (1e-3 if self._model.dtype == torch.float32 else 0.1):
            raise _unsupported(model_path, f"log-probs that differ by {difference:.3g} from a plain forward pass")


def check_reach(model_path: str, facts: ModelFacts) -> None:
    """Raises ModelError for a model some of whose layers do not see the whole context."""
    text = facts.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention", "sliding_attention"])
    window = getattr(text, "sliding_window", None)
    if "sliding_attention" in kinds and window and window < facts.max_length:
        raise _unsupported(
            model_path, f"a sliding window of {window} tokens (generation.max_model_len may be lowered to it)"
        )
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise _unsupported(model_path, f"layers of kind {', '.join(sorted(unknown))}")


def _unsupported(model_path: str, got: str) -> ModelError:
    return ModelError(
        f"expected a model with standard causal attention at {model_path}, got {got}; use the vllm engine for it"
    )


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ModelError("expected a CUDA device (generation.device), got none; set generation.device to auto or cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")
