"""Which code multiplies the experts of a mixture, so that a CUDA graph can hold it.

transformers has three ways, and none fits everywhere. Its loop over experts asks the device which experts were hit.
`grouped_mm` is torch's grouped product: CUTLASS kernels for bfloat16 on compute capability 9 and 10, and for all else on
CUDA a loop that copies the groups' ends to the host, which no graph can hold. `batched_mm` copies the weights of every pair
of a token and an expert: right for a decode step, hopeless for a prefill. The fourth, `segue`, is ours: Triton kernels that
find their expert on the device. `by_rows` takes ours for few rows, as a decode step has, and torch's product for more.

What lies around the products is ours in both: pairs of a token and an expert are sorted in one or two launches, padded
tokens are in none of them, and a token's results are added up where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from segue.errors import ConfigError
from segue.graph import current
from segue.llm.batch import in_engine
from segue.llm.experts import OURS, experts_modules
from segue.llm.kernels import has_triton
from segue.llm.kernels.reference import activation_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS = ("auto", "grouped_mm", "batched_mm", "segue", "by_rows")
FEW_ROWS = 64
"""up to which ours were measured, and took 0.69 to 0.85 of the grouped product's step (H200, Qwen3-30B-A3B's shape)"""
SINGLE_ROWS = 4
"""up to which each pair of a token and an expert reads the expert's weights by itself: 0.83 to 0.91 of the time (H200)"""
_GROUPED_CAPABILITIES = frozenset({9, 10})


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """An implementation by name. `asked` is what the configuration said, `why` one clause."""

    name: str
    asked: str
    why: str

    def explain(self) -> str:
        """What start-up prints."""
        arrow = self.name if self.asked == self.name else f"{self.asked} -> {self.name}"
        return f"experts: {arrow} ({self.why})"


def choose_experts(model: PreTrainedModel, asked: str, capability: tuple[int, int] | None) -> ExpertsChoice | None:
    """Settles how the experts of `model` run, on a GPU of `capability` or on cpu (None), and sets it. None where the model
    has no experts, or leaves no choice.

    Raises ConfigError where there is none of that name, or it cannot run these experts.
    """
    if asked not in EXPERTS:
        raise ConfigError(f"experts is {asked!r}; it must be one of {', '.join(EXPERTS)}")
    modules = [module for module in experts_modules(model) if hasattr(module, "has_gate")]  # what transformers dispatches
    if not modules:
        return None
    refusal = _refusal(modules)
    if asked in OURS and refusal is not None:
        raise ConfigError(f"experts is {asked!r}, which cannot run these: {refusal}; choose another, or 'auto'")
    choice = ExpertsChoice(asked, asked, "as asked")
    if asked == "auto":
        choice = _automatic(model.dtype, capability, refusal)
    _register()
    model.set_experts_implementation(choice.name)
    if choice.name in OURS:
        for module in modules:
            module.segue_activation = activation_of(module, module.gate_up_proj.device)
    return choice


def _automatic(dtype: torch.dtype, capability: tuple[int, int] | None, refusal: str | None) -> ExpertsChoice:
    if capability is None:
        return ExpertsChoice("grouped_mm", "auto", "torch's grouped product")
    if dtype is torch.bfloat16 and capability[0] in _GROUPED_CAPABILITIES:
        if refusal is None and has_triton():
            return ExpertsChoice("by_rows", "auto", f"segue's kernels up to {FEW_ROWS} rows, torch's grouped product beyond")
        return ExpertsChoice("grouped_mm", "auto", "torch's grouped product, which reads nothing on the host here")
    kind = f"{dtype} on compute capability {capability[0]}.{capability[1]}".removeprefix("torch.")
    why = f"torch's grouped product reads on the host with {kind}"
    if refusal is not None:
        return ExpertsChoice(
            "batched_mm", "auto", f"{why}, and segue's cannot run these: {refusal}; large prefills are slow"
        )
    if not has_triton():
        return ExpertsChoice("batched_mm", "auto", f"{why}, and triton is not installed; large prefills are slow")
    return ExpertsChoice("segue", "auto", why)


def _refusal(modules: Iterable[Any]) -> str | None:
    """Why our kernels cannot run these experts, in one clause; None where they can."""
    for module in modules:
        if not module.has_gate or module.is_transposed or not module.is_concatenated or module.has_bias:
            return "they have biases, no gate, or weights laid out in another way"
        if getattr(module, "has_post_expert_norm", False) or type(module)._apply_gate.__name__ != "_default_apply_gate":
            return "they do more between their products than an activation and a gate"
        weights = (module.gate_up_proj, module.down_proj)
        if not all(isinstance(weight, torch.Tensor) and weight.is_contiguous() for weight in weights):
            return "their weights are not plain tensors"
        if activation_of(module, weights[0].device) is None:
            return "their activation is an unknown one"
    return None


def _register() -> None:
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("segue", experts_forward)
    ExpertsInterface.register("by_rows", by_rows_forward)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' convention: ``[T, hidden]``, ``[T, k]``, ``[T, k]`` -> ``[T, hidden]``. Recordable. An index that is no
    expert's adds nothing and costs nothing; nor do rows beyond the tokens of a batch."""
    if hidden_states.shape[0] <= SINGLE_ROWS:
        num_tokens = _num_tokens(self)
        up = torch.ops.segue.pairs_up(hidden_states, top_k_index, num_tokens, self.gate_up_proj, self.segue_activation)
        out: torch.Tensor = torch.ops.segue.pairs_down(up, top_k_index, num_tokens, self.down_proj, top_k_weights)
        return out
    tokens, places, ends = _pairs(self, top_k_index)
    up = torch.ops.segue.experts_up(hidden_states, tokens, ends, self.gate_up_proj, self.segue_activation)
    return _combined(torch.ops.segue.experts_down(up, ends, self.down_proj), places, top_k_weights)


def grouped_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same, by torch's grouped product. It leaves rows of no expert unwritten, and nobody reads them."""
    tokens, places, ends = _pairs(self, top_k_index)
    up = F.grouped_mm(hidden_states.index_select(0, tokens), self.gate_up_proj.transpose(1, 2), offs=ends)
    up = torch.ops.segue.gated(up, self.segue_activation)
    return _combined(F.grouped_mm(up, self.down_proj.transpose(1, 2), offs=ends), places, top_k_weights)


def by_rows_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `experts_forward`; a compiler, whose program serves all sizes, gets the grouped product alone."""
    is_small = not torch.compiler.is_compiling() and hidden_states.shape[0] <= FEW_ROWS
    forward = experts_forward if is_small else grouped_forward
    return forward(self, hidden_states, top_k_index, top_k_weights)


def _pairs(experts: Any, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    pairs = torch.ops.segue.pairs_by_expert(index, experts.num_experts, _num_tokens(experts))
    return pairs


def _num_tokens(experts: Any) -> torch.Tensor | None:
    return current().batch.num_tokens if in_engine(experts) else None


def _combined(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.segue.combine(rows, places, weights)
    return out
