"""What keeps a model's steps from being captured, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attach import OUTPUT_HOOKS
from .drafters.taps import Tap
from .layers import OasisLayer
from .ops import cuda

if TYPE_CHECKING:
    from .cache import OasisCache
    from .state import Step

_PLAIN = {"input_ids", "position_ids", "attention_mask", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments that a captured call may have; any other that is not None, False or empty makes it eager."""

_HARMLESS = (OUTPUT_HOOKS, Tap.__module__)


def cannot_hold(cache: "OasisCache") -> str | None:
    """Why these layers' steps can't be captured."""
    config = cache.state.config
    for layer in cache.layers:
        if layer.device != cache.device:
            return "layers are on several devices"
        if not isinstance(layer, OasisLayer):
            continue
        if not cuda.serves(layer.working_set.keys):
            return "the compiled operators don't serve this model's dtype and head_dim here"
        pages = layer.store.device_pages(layer.index)
        if pages is None:
            return f"store={config.store!r}"
        if pages[0].dtype != layer.working_set.keys.dtype:
            return f"host_dtype={config.host_dtype!r}"
    return None


def hooked(model: Any) -> str | None:
    """Why code of others runs inside the model's forward: a replay would leave it out. transformers' own hooks, which
    stay once a call asked for hidden states, do nothing unless a call asks, and such a call is eager; a drafter's taps
    copy on the device alone, which a graph repeats."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if getattr(hook, "__module__", "") not in _HARMLESS]
        if foreign or hasattr(module, "_hf_hook"):
            return f"{name or 'the model'} has a forward hook"
    return None


def not_plain(call: dict[str, Any], step: "Step", name: str) -> str | None:
    """Why a call, the cache under `name`, is not a plain step of one token."""
    if step.mode != "decode" or step.count != 1:
        return "it verifies a caller's own tokens"
    if call.get("input_ids") is None:
        return "the call has embeddings instead of ids"
    if call.get("position_ids") is None:
        return "the call has no position_ids"
    other = [
        key for key, value in call.items()
        if key not in _PLAIN and key != name and not (value is None or value is False or value == {})
    ]  # fmt: skip
    if other:
        return f"the call has {', '.join(sorted(other))}"
    return None
