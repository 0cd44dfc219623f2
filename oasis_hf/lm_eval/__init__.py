"""The model `oasis` of lm-evaluation-harness: a stock `hf` model that reads and answers through an `OasisCache`.

Importing this registers it: then `simple_evaluate(model="oasis", ...)` knows it. From a shell it is
`python -m oasis_hf.lm_eval run --model oasis ...`, lm-eval's own command.
"""

try:
    from lm_eval.api.registry import model_registry, register_model
except ImportError as error:
    raise ImportError("oasis_hf.lm_eval needs lm-evaluation-harness: pip install 'oasis-hf[eval]'.") from error

from .model import OasisLM

# A later lm-eval may have put the entry point of this name there, and that is what leads here.
if "oasis" not in model_registry:
    register_model("oasis")(OasisLM)

__all__ = ["OasisLM"]
