"""`python -m oasis_hf.lm_eval`: the command of lm-evaluation-harness, which then knows the model `oasis`."""

from __future__ import annotations

import sys
from unittest import mock

import torch
from lm_eval.__main__ import cli_evaluate

from .. import ConfigError, DrafterError, HostMemoryError
from ..models import ModelError

PROGRAM = "oasis_hf.lm_eval"


def main(arguments: list[str] | None = None) -> int:
    """Run lm-eval's command. Returns the exit status: 0, or 2 for a mistake in the call, told in one sentence."""
    try:
        # The harness takes its arguments from there only.
        with mock.patch.object(sys, "argv", [PROGRAM, *(sys.argv[1:] if arguments is None else arguments)]):
            cli_evaluate()
    except (ConfigError, DrafterError, HostMemoryError, ModelError, torch.OutOfMemoryError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        print(f"{PROGRAM}: {error}; `python -m oasis_hf.lm_eval ls tasks` lists those there are.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
