"""Inference with trained models: load, decode with a cache, generate in batches, package for distribution.

    model = load_model("outputs/smoke-...")
    (new,) = generate(model, ["def "], max_new_tokens=40)

A text is passed as its bytes; `new` are token ids.
"""

from nsa_lab.inference.decode import Decoder
from nsa_lab.inference.generate import generate
from nsa_lab.inference.load import load_model
from nsa_lab.inference.package import ship
from nsa_lab.inference.sampling import Sampling
from nsa_lab.inference.text_generation import SpeedMeter, complete_prompt, continue_text
from nsa_lab.runs.model_files import NoCheckpoint, find_checkpoint

__all__ = [
    "Decoder",
    "NoCheckpoint",
    "Sampling",
    "SpeedMeter",
    "complete_prompt",
    "continue_text",
    "find_checkpoint",
    "generate",
    "load_model",
    "ship",
]
