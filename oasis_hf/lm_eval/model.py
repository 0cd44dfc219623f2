"""`OasisLM`: lm-evaluation-harness's adapter for transformers, over an `OasisCache`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from .. import generation, models
from ..attach import cache_name
from ..cache import OasisCache
from . import arguments
from .scoring import loglikelihoods


class OasisLM(HFLM):
    """The harness's `hf` model with an `OasisCache` in every call, registered as `oasis`.

    `generate_until` generates over the cache, with `speculate=True` by `oasis_hf.generate`. `loglikelihood` scores
    decode steps over the working set (`scoring.py`), and so does `loglikelihood_rolling`: there each window has one
    token of context and all others are steps, one forward each. With `sparse_loglikelihood=False` both are the
    harness's own, one dense forward over context and continuation, in which no cache takes part.

    Args:
        pretrained: what `oasis_hf.models.load` takes, the bundled SmolLM2 where it is None; or a loaded model.
        device, dtype: where to and as what it is loaded; "auto", None: as `load` has it.
        batch_size: rows of a batch, an integer.
        drafter: as `OasisCache` takes it.
        mode: a name in `oasis_hf.MODES`, whose policy the cache has; None: what the knobs say.
        sparse_loglikelihood: whether loglikelihoods are those of the working set.
        **given: knobs of `OasisConfig`, as text too, and `arguments.HARNESS`, which `HFLM` explains. tokenizer: an id
            or path, or a loaded one; None: the model's.

    Raises:
        ConfigError: an argument or a knob that is unknown or has a wrong value, or a model that an `OasisCache` can't
            serve. DrafterError: the drafter does not fit. ModelError: no such model or tokenizer, or no room for it.
    """

    def __init__(
        self, pretrained: Any = None, *, device: Any = None, dtype: Any = None, batch_size: Any = 1,
        drafter: Any = None, mode: Any = None, sparse_loglikelihood: Any = True, **given: Any,
    ) -> None:  # fmt: skip
        config, harness = arguments.split(given, mode)
        self.mode = mode
        batch_size = arguments.rows(batch_size)
        self.sparse_loglikelihood = arguments.switch("sparse_loglikelihood", sparse_loglikelihood)
        where, as_what = arguments.torch_device(device), arguments.torch_dtype(dtype)
        tokenizer = harness.pop("tokenizer", None)
        if pretrained is None or isinstance(pretrained, str):
            named = isinstance(tokenizer, str)
            model, own = models.load(pretrained, where, as_what, **({"tokenizer": tokenizer} if named else {}))
            tokenizer = own if named or tokenizer is None else tokenizer
        else:
            model = pretrained
            if tokenizer is None or isinstance(tokenizer, str):
                tokenizer = models.load_tokenizer(tokenizer or _name(model))
        self.oasis = OasisCache(model, config, drafter=drafter)
        with _no_advice():
            super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **harness)
        if isinstance(pretrained, str):
            self.pretrained = pretrained  # for the results, which name it

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "OasisLM":
        """As `create_from_arg_obj`, of `model_args` as text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "OasisLM":
        """As the harness has it, but what `model_args` name goes before the options of its command, which says "cuda:0"
        and a batch of 1 where nobody said anything."""
        rest = {name: value for name, value in (additional_config or {}).items() if name not in arg_dict}
        return super().create_from_arg_obj(arg_dict, rest)

    def get_model_info(self) -> dict[str, Any]:
        """As `HFLM` has it, and what the cache was, for the results."""
        config = self.oasis.state.config
        oasis = {field.name: getattr(config, field.name) for field in fields(config)}
        oasis["mode"] = self.mode
        oasis["drafter"] = type(self.oasis.drafter).__name__
        return {**super().get_model_info(), "oasis": {**oasis, "sparse_loglikelihood": self.sparse_loglikelihood}}

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **given: Any) -> torch.Tensor:
        """`context` `[B, n]`, padded on the left, with what is generated behind it."""
        self.oasis.reset()
        if not given.get("do_sample"):
            given["do_sample"] = False
            given.pop("temperature", None)  # the harness says 0, of which transformers warns
        speculates = self.oasis.state.config.speculate
        run = functools.partial(generation.generate, self.model) if speculates else self.model.generate
        given[cache_name(self.model)] = self.oasis
        return run(
            input_ids=context, max_length=max_length, pad_token_id=self.tokenizer.pad_token_id, use_cache=True,
            stopping_criteria=StoppingCriteriaList([Said(stop, self.tokenizer, context.shape[1])]),
            **given,
        )  # fmt: skip

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Each of `requests` is (what it is called in lm-eval's cache or None, ids of the context, of what follows)."""
        if not self.sparse_loglikelihood:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        answers: dict[int, tuple[float, bool]] = {}
        rows = override_bs or self.batch_size
        pairs = [(context, continuation) for _, context, continuation in requests]
        silent = disable_tqdm or self.rank != 0
        with tqdm(total=len(pairs), disable=silent, desc="Running loglikelihood requests") as bar:
            for one in loglikelihoods(self.oasis, pairs, rows, self.max_length, self.softmax_dtype):
                answers[one.request] = answer = (one.total, one.greedy)
                if requests[one.request][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[one.request][0], answer)
                bar.update(1)
        return [answers[number] for number in range(len(pairs))]


class Said(StoppingCriteria):
    """A row ends once its text holds one of the stop strings. The harness's own criterion tells when all rows have, and
    remembers it from call to call; `oasis_hf.generate` asks of each row, and of drafts that may be rejected.

    Args:
        strings: any of them. start: columns of the prompt, which does not count.
    """

    def __init__(self, strings: list[str], tokenizer: Any, start: int) -> None:
        self.strings, self.tokenizer, self.start = [one for one in strings if one], tokenizer, start
        # Two more than it takes to write one, as the harness has it: text can be cut into tokens in several ways.
        written = [len(tokenizer.encode(one, add_special_tokens=False)) for one in self.strings]
        self.last = max(written, default=0) + 2

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tail = input_ids[:, self.start :][:, -self.last :]
        said = [any(one in text for one in self.strings) for text in self.tokenizer.batch_decode(tail)]
        return torch.tensor(said, dtype=torch.bool, device=input_ids.device)


def _name(model: Any) -> str:
    name = getattr(model, "name_or_path", "")
    if not name:
        raise models.ModelError(
            f"OasisLM was given a {type(model).__name__} that doesn't say where it came from: give tokenizer= too."
        )
    return name


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """`HFLM` warns that with a loaded model many arguments are ignored; those that would be are refused before."""
    logger = logging.getLogger(HFLM.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
